"""The fleet's status as tables for people, for a console of `deploy.consoles`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

_PENDING_S = 10.0
"""Starting the process of an actor takes seconds where much else runs."""
_NAMED = 3


def models_table(status: dict[str, Any]) -> Table:
    """A row a model: workers wanted and serving, and its load."""
    table = _table("model", "serving", "wanted", "bounds", "running", "queued")
    for name, model in status["models"].items():
        low, high = model["min"], model["max"]
        bounds = str(low) if low == high else f"{low}-{high}"
        numbers = (model["serving"], model["wanted"], bounds, model["running_requests"], model["queued_requests"])
        table.add_row(name, *map(str, numbers))
    return table


def members_table(status: dict[str, Any]) -> Table:
    """A row a router or worker: state, address, node, load."""
    nodes = {node["id"]: node["address"] for node in status["nodes"]}
    table = _table("member", "state", "for", "address", "node", "running")
    for member in status["members"]:
        state = member["phase"] + (
            " (restarting)" if member["restarting"] else " (leaving)" if member["leaving"] else ""
        )
        table.add_row(
            member["name"],
            state if member["current"] or member["leaving"] else f"{state} (to be replaced)",
            _duration(member["phase_s"]),
            member["address"],
            nodes.get(member["node_id"], ""),
            str(member["running_requests"]),
        )
    return table


def notes(status: dict[str, Any]) -> list[str]:
    """What an operator should know or do, a line each."""
    lines = [trouble] if (trouble := status.get("trouble")) else []  # a supervisor of an earlier version has none
    lines += [f"{each['name']}: {each['message']}" for each in status["members"] if each["message"]]
    waiting: dict[tuple[str, str], list[str]] = {}
    for member in status["members"]:
        if member["phase"] == "pending" and member["phase_s"] > _PENDING_S:
            needs = ", ".join(f"{name}: {amount:g}" for name, amount in member["needs"].items())
            waiting.setdefault((member["group"], needs), []).append(member["name"])
    for (group, needs), names in waiting.items():
        who = f"{some(names)} {'waits' if len(names) == 1 else 'wait'}"
        lines.append(f"{who} for a node that has {needs} to spare; the cluster has {_totals(status)}")
        lines += _held(status, group, names)
    lines += [
        f"node {node['address']} is cordoned: `radixfleet fleet drain --node {node['address']} --undo` ends it"
        for node in status["nodes"]
        if node["cordoned"] and node["alive"]
    ]
    return lines


def departures(status: dict[str, Any]) -> list[str]:
    """Nodes that are taken away, a line each. They count down, so whoever prints what is new leaves them out."""
    return [
        f"node {node['address']} goes {_when(node['left_s'])}, for Ray drains it: its workers leave"
        for node in status["nodes"]
        if node["draining"] and node["alive"]
    ]


def _when(left_s: float | None) -> str:
    return "soon" if left_s is None else f"in {_duration(max(0.0, left_s))}"


def _held(status: dict[str, Any], group: str, waiting: list[str]) -> list[str]:
    """The last that serves, where it shall go and goes on for those who wait for a place."""
    serving = [each for each in status["members"] if each["group"] == group and each["phase"] == "serving"]
    if len(serving) != 1 or not (serving[0]["leaving"] or not serving[0]["current"]):
        return []
    last = serving[0]["name"]
    return [
        f"{last} is the last of {group} and serves until {some(waiting)} can; where no node will come, "
        f"`radixfleet fleet drain {last} --now` makes room, and nobody serves meanwhile"
    ]


def some(names: list[str]) -> str:
    """The first of many names, and how many more."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _totals(status: dict[str, Any]) -> str:
    totals: dict[str, float] = {}
    for node in status["nodes"]:
        for name, amount in node["resources"].items() if node["alive"] else ():
            if "memory" not in name:
                totals[name] = totals.get(name, 0.0) + amount
    return ", ".join(f"{name}: {amount:g}" for name, amount in sorted(totals.items())) + " in all"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        numeric = column in ("serving", "wanted", "running", "queued", "for")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=index == 0 or column == "address")
    return table

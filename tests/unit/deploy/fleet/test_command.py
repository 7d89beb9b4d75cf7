"""`radixfleet fleet` before it reaches a cluster, and what it prints of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from deploy.commands.fleet import fleet
from deploy.fleet.spec import EXAMPLE
from deploy.fleet.tables import departures, members_table, models_table, notes


def test_init_prints_an_example_that_apply_would_take(tmp_path: Path) -> None:
    printed = CliRunner().invoke(fleet, ["init"])
    assert (printed.exit_code, printed.output) == (0, EXAMPLE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scale", "demo", "many"], "write a number of workers, or MIN-MAX; got 'many'"),
        (["scale", "demo", "2-"], "write a number"),
        (["drain"], "name workers, or one --node"),
        (["drain", "m-0", "--node", "n"], "name workers, or one --node"),
        (["drain", "--undo"], "name workers, or one --node"),
        (["drain", "--node", "n", "--now"], "--now goes with workers"),
        (["restart"], "Missing argument"),
    ],
)
def test_wrong_usage_is_told_before_any_cluster_is_asked(arguments: list[str], said: str) -> None:
    told = CliRunner().invoke(fleet, arguments)
    assert told.exit_code == 2
    assert said in told.output


def test_a_wrong_file_is_refused_before_any_cluster_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("models: {m: {workers: 1, settings: {model: demo, pagesize: 1}}}")
    refused = CliRunner().invoke(fleet, ["apply", str(path)])
    assert refused.exit_code == 2
    assert "pagesize" in refused.output
    assert "did you mean page_size?" in refused.output


def member(**fields: Any) -> dict[str, Any]:
    defaults = {
        "name": "m-0",
        "kind": "worker",
        "group": "m",
        "phase": "serving",
        "phase_s": 12.0,
        "address": "10.0.0.2:7080",
        "node_id": "n1",
        "running_requests": 3,
        "message": "",
        "current": True,
        "needs": {"GPU": 1.0},
        "leaving": False,
        "restarting": False,
    }
    return defaults | fields


def status(*members: dict[str, Any], cordoned: bool = False) -> dict[str, Any]:
    node = {
        "id": "n1",
        "address": "10.0.0.2",
        "alive": True,
        "cordoned": cordoned,
        "draining": False,
        "left_s": None,
        "resources": {"GPU": 1.0, "memory": 9},
    }
    counts = {"serving": 1, "wanted": 2, "min": 1, "max": 4, "running_requests": 3, "queued_requests": 5}
    return {"models": {"m": counts}, "members": list(members), "nodes": [node]}


class ScriptedCluster:
    """In the place of `deploy.fleet.cluster.Cluster`: one status after the other, the last for ever."""

    statuses: list[dict[str, Any]] = []  # noqa: RUF012  given before each use
    orders: list[tuple[object, ...]] = []  # noqa: RUF012

    def node_id(self, name: str) -> str:
        return {"10.0.0.2": "n1"}[name]

    def order(self, *order: object, **options: object) -> None:
        self.orders.append((*order, options))

    def status(self) -> dict[str, Any]:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


def drained_node(
    monkeypatch: pytest.MonkeyPatch, *statuses: dict[str, Any], options: tuple[str, ...] = ()
) -> tuple[int, int]:
    """Exit code of `drain --node`, and how many of the statuses were not waited for."""

    @contextmanager
    def connected(address: str) -> Iterator[None]:
        yield

    monkeypatch.setattr("deploy.fleet.cluster.connected", connected)
    monkeypatch.setattr("deploy.fleet.cluster.Cluster", ScriptedCluster)
    monkeypatch.setattr("deploy.commands.fleet._POLL_S", 0.0)
    ScriptedCluster.statuses, ScriptedCluster.orders = list(statuses), []
    command = ["drain", "--node", "10.0.0.2", "--timeout", "0", *options]
    code = CliRunner().invoke(fleet, command, standalone_mode=False).return_value
    return int(code), len(ScriptedCluster.statuses) - 1


def test_a_node_is_drained_when_it_has_no_worker_whether_or_not_their_successors_have_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that is taken away, a pod that ends, would else wait for a node that is on its way for minutes."""
    router = member(name="router-0", kind="router", group="routers")
    waiting = member(name="m-1", phase="pending", node_id="")
    unsettled = {"settled": False}
    empty = status(router, waiting, cordoned=True) | unsettled
    assert drained_node(monkeypatch, empty) == (0, 0)
    assert ScriptedCluster.orders == [("cordon", "n1", {"undo": False})]
    there = status(router, member(phase="draining", leaving=True), waiting, cordoned=True) | unsettled
    assert drained_node(monkeypatch, there) == (1, 0), "its worker is still there"
    unseen = member(name="m-2", phase="pending", node_id="", leaving=True)
    assert drained_node(monkeypatch, status(router, unseen, cordoned=True)) == (1, 0), "it may be there"
    assert drained_node(monkeypatch, empty, options=("--undo",)) == (1, 0), "the fleet is not whole yet"


def printed(table: object) -> str:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables_tell_where_each_member_is_and_what_becomes_of_it() -> None:
    shown = printed(
        members_table(
            status(member(), member(name="m-1", phase="draining", leaving=True), member(name="m-2", current=False))
        )
    )
    assert "m-0    serving                  12 s 10.0.0.2:7080 10.0.0.2" in shown
    assert "draining (leaving)" in shown
    assert "serving (to be replaced)" in shown
    assert "1-4" in printed(models_table(status()))


def test_notes_say_what_a_waiting_worker_needs_and_how_a_node_is_opened_again() -> None:
    waiting = member(name="m-1", phase="pending", phase_s=60.0, node_id="")
    lines = notes(status(member(message="use a smaller chunk"), waiting, cordoned=True))
    assert lines == [
        "m-0: use a smaller chunk",
        "m-1 waits for a node that has GPU: 1 to spare; the cluster has GPU: 1 in all",
        "node 10.0.0.2 is cordoned: `radixfleet fleet drain --node 10.0.0.2 --undo` ends it",
    ]


@pytest.mark.parametrize(("left_s", "when"), [(57.2, "in 57 s"), (None, "soon")])
def test_a_node_that_ray_drains_is_told_with_the_time_that_it_has(left_s: float | None, when: str) -> None:
    told = status(member())
    assert departures(told) == []
    told["nodes"][0] |= {"draining": True, "left_s": left_s}
    assert departures(told) == [f"node 10.0.0.2 goes {when}, for Ray drains it: its workers leave"]
    told["nodes"][0]["alive"] = False
    assert departures(told) == [], "it has gone"


def test_the_last_that_serves_on_for_one_that_waits_is_told_with_what_lets_it_go() -> None:
    waiting = member(name="m-1", phase="pending", phase_s=60.0, node_id="")
    for last in (member(leaving=True), member(current=False)):
        lines = notes(status(last, waiting))
        assert lines[1].startswith("m-0 is the last of m and serves until m-1 can")
        assert "`radixfleet fleet drain m-0 --now` makes room" in lines[1]
    assert len(notes(status(member(), waiting))) == 1, "it goes nowhere"
    assert len(notes(status(member(leaving=True), member(name="m-2"), waiting))) == 1, "another serves"


def test_many_that_wait_take_one_line() -> None:
    waiting = [member(name=f"m-{number}", phase="pending", phase_s=60.0, node_id="") for number in range(9)]
    (line,) = notes(status(*waiting))
    assert line.startswith("m-0, m-1, m-2 and 6 more wait for a node that has GPU: 1 to spare")


def test_why_a_fleet_is_left_alone_comes_first() -> None:
    told = status(member(message="use a smaller chunk")) | {"trouble": "the fleet is left as it is"}
    assert notes(told)[0] == "the fleet is left as it is"

"""The fleet's status as plain data, for `radixfleet fleet status` and for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deploy.fleet.books import Books
from deploy.fleet.spec import ROUTER_GROUP, FleetSpec
from deploy.fleet.watch import Watch


def describe(
    books: Books,
    watches: Mapping[str, Watch],
    spec: FleetSpec | None,
    queued: Mapping[str, int],
    going: Mapping[str, float],
) -> dict[str, Any]:
    """models, members, routers; `settled`: everything wanted serves, and nothing else is there.

    `going`: nodes that are taken away, each with the seconds that are left (inf: not known).
    """
    members = [_member(name, books, watches[name], spec) for name in sorted(books.members, key=_order)]
    models = {model: _model(model, books, members, queued) for model in books.counts}
    routers = spec.routers.count if spec is not None else 0
    settled = _as_many(members, ROUTER_GROUP, routers) and all(
        _as_many(members, model, books.counts[model]) for model in models
    )
    return {
        "settled": settled and len(members) == routers + sum(books.counts.values()),
        "routers": [member["address"] for member in members if member["group"] == ROUTER_GROUP and member["address"]],
        "models": models,
        "members": members,
        "cordoned_nodes": sorted(books.cordoned),
        "draining_nodes": {node: round(left_s, 1) if left_s < math.inf else None for node, left_s in going.items()},
    }


def _as_many(members: list[dict[str, Any]], group: str, count: int) -> bool:
    serving = [each for each in members if each["group"] == group and each["phase"] == "serving" and each["current"]]
    return len(serving) == count


def _member(name: str, books: Books, watch: Watch, spec: FleetSpec | None) -> dict[str, Any]:
    record, report = books.members[name], watch.report
    wanted = spec is not None and (record.group == ROUTER_GROUP or record.group in spec.models)
    return {
        "name": name,
        "group": record.group,
        "kind": "router" if record.group == ROUTER_GROUP else "worker",
        "phase": watch.phase(),
        "phase_s": round(watch.phase_s, 1),
        "address": report.address if report else "",
        "metrics_address": report.metrics_address if report else "",
        "node_id": report.node_id if report else record.node_id,
        "pids": list(report.pids) if report else [],
        "running_requests": report.running_requests if report else 0,
        "message": watch.failure or (report.message if report else ""),
        "current": wanted and spec is not None and record.revision == spec.revision(record.group),
        "needs": _needs(record.group, spec) if wanted and spec is not None else {},
        "leaving": name in books.leaving,
        "restarting": name in books.restarting,
    }


def _needs(group: str, spec: FleetSpec) -> dict[str, float]:
    return dict(spec.routers.resources if group == ROUTER_GROUP else spec.models[group].needs)


def _model(model: str, books: Books, members: list[dict[str, Any]], queued: Mapping[str, int]) -> dict[str, Any]:
    own = [member for member in members if member["group"] == model]
    low, high = books.bounds[model]
    return {
        "wanted": books.counts[model],
        "min": low,
        "max": high,
        "serving": sum(member["phase"] == "serving" for member in own),
        "running_requests": sum(member["running_requests"] for member in own),
        "queued_requests": queued.get(model, 0),
    }


def _order(name: str) -> tuple[bool, str, int]:
    group, _, number = name.rpartition("-")
    return group != ROUTER_GROUP, group, int(number)

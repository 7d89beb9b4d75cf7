"""What the processes of a fleet on one machine are started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.local_fleet import FleetSpec


def spec(router_options: dict[str, Any], worker_options: dict[str, Any]) -> FleetSpec:
    return FleetSpec(2, router_options, {"device": "cpu", **worker_options}, Path("run"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"log_level": None, "log_json": None}, ()),
        ({"log_level": "debug", "log_json": True}, ("--log-level", "debug", "--log-json")),
        ({"log_json": False}, ("--no-log-json",)),
    ],
)
def test_router_and_workers_log_alike(given: dict[str, Any], expected: tuple[str, ...]) -> None:
    fleet = spec({"port": 7000}, given)
    assert fleet.router().arguments == ("router", *expected, "--port", "7000")
    logging = [part for part in fleet.worker(0, "127.0.0.1:7000").arguments if "log" in part or part == "debug"]
    assert tuple(logging) == expected


def test_a_router_with_a_level_of_its_own_keeps_it() -> None:
    fleet = spec({"log_level": "warning"}, {"log_level": "debug"})
    assert fleet.router().arguments == ("router", "--log-level", "warning")

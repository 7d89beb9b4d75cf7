"""Behaviour 63: all that a dashboard, a recording rule or an alert asks for is there, on a live fleet under load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import deploy.monitoring
from tests.support.monitored_fleet import RULES, Phase, Recording, recorded, substituted
from tests.support.prometheus import needs_prometheus

pytestmark = [pytest.mark.prometheus, needs_prometheus]

DASHBOARDS = sorted((Path(deploy.monitoring.__file__).parent / "files" / "grafana" / "dashboards").glob("*.json"))
_SELECTOR = re.compile(r"\b(?:radixfleet_|radixfleet:|up\b|process_)[\w:]*(?:\{[^}]*\})?")


@pytest.fixture(scope="module")
def recording() -> Iterator[Recording]:
    with recorded(Phase(seconds=4)) as recording:
        yield recording


def expressions() -> list[Any]:
    """(expression) of every panel of every dashboard, named by board and panel."""
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                found.append(pytest.param(target["expr"], id=name))
    return found


def rules() -> list[dict[str, Any]]:
    """Recording rules and alerts."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def selectors() -> list[str]:
    """Each series that a rule asks for, with its labels."""
    return sorted({selector for rule in rules() for selector in _SELECTOR.findall(rule["expr"])})


@pytest.mark.parametrize("expr", expressions())
def test_every_panel_has_data(recording: Recording, expr: str) -> None:
    """Behaviour 63."""
    assert recording.values(expr), expr


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_has_values_to_choose_from(recording: Recording, dashboard: Path) -> None:
    """Behaviour 63."""
    variables = [each for each in json.loads(dashboard.read_text())["templating"]["list"] if each["type"] == "query"]
    assert variables
    for variable in variables:
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert asked is not None
        series = {"match[]": substituted(asked[1])}
        assert recording.prometheus.get(f"label/{asked[2]}/values", **series), variable["query"]


@pytest.mark.parametrize("record", [rule["record"] for rule in rules() if "record" in rule])
def test_every_recording_rule_records(recording: Recording, record: str) -> None:
    """Behaviour 63."""
    assert recording.values(record)


@pytest.mark.parametrize("selector", selectors())
def test_every_series_that_a_rule_asks_for_is_there(recording: Recording, selector: str) -> None:
    """Behaviour 63: an alert on a series that nobody exports would never fire."""
    assert recording.values(f"count({selector})"), selector


def test_no_rule_fails_to_evaluate_and_no_alert_of_damage_fires(recording: Recording) -> None:
    groups = recording.prometheus.get("rules")["groups"]
    health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert len(health) == len(rules())
    assert {name for name, state in health.items() if state != "ok"} == set()
    firing = {
        alert["labels"]["alertname"]
        for alert in recording.prometheus.get("alerts")["alerts"]
        if alert["state"] == "firing"
    }
    assert firing == set()


def test_targets_are_found_and_labelled_by_discovery(recording: Recording) -> None:
    targets = recording.prometheus.get("targets")["activeTargets"]
    labels = sorted(  # a Ray that ran on this machine leaves targets of its own
        tuple(each["labels"].get(name, "") for name in ("role", "worker_id", "model"))
        for each in targets
        if each["labels"]["job"] == "radixfleet"
    )
    assert labels == [
        ("router", "", ""),
        ("worker", "worker-0", "sim-model"),
        ("worker", "worker-1", "sim-model"),
    ]


def test_what_the_boards_show_is_what_happened(recording: Recording) -> None:
    """The hit rate of the routers is that of the workers, and the three gaps and it make a whole."""
    (router_hits,) = recording.values("sum(radixfleet_router_prompt_tokens_actual_total)")
    (worker_hits,) = recording.values("sum(radixfleet_worker_cached_tokens_total)")
    assert router_hits == pytest.approx(worker_hits, rel=0.2)
    (hit_rate,) = recording.values("radixfleet:hit_rate:ratio5m")
    assert 0.1 < hit_rate < 0.95
    (evicted,) = recording.values("sum(radixfleet_worker_evicted_blocks_total)")
    assert evicted > 0
    (waited,) = recording.values("sum(radixfleet_router_queue_seconds_count)")
    assert waited > 0

"""The rules and configurations, by Prometheus' own tool."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deploy.monitoring.bundle import write_bundle
from tests.support.monitored_fleet import RULES
from tests.support.prometheus import needs_prometheus, promtool

pytestmark = [pytest.mark.prometheus, needs_prometheus]

CASES = Path(__file__).parent / "rules_test.yml"


def test_alerts_fire_on_what_they_are_for_and_not_before(tmp_path: Path) -> None:
    cases = tmp_path / "cases.yml"
    cases.write_text(CASES.read_text().replace("RULES", str(RULES)))
    outcome = promtool("test", "rules", str(cases))
    assert outcome.returncode == 0, outcome.stdout


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    checks = [check for test in yaml.safe_load(CASES.read_text())["tests"] for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == alerts
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == alerts


def test_promtool_accepts_what_operators_are_given(tmp_path: Path) -> None:
    write_bundle(tmp_path, ["10.0.0.1:7071", "10.0.0.2:7071"])
    outcome = promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stdout
    assert "1 rule files found" in outcome.stdout

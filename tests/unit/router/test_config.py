from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from radixfleet.settings import SettingsError, load
from router.__main__ import main
from router.config import PolicyName, RouterSettings
from router.policies import DEFAULT_POLICY, POLICY_NAMES


def test_the_policies_to_choose_from_are_those_that_there_are() -> None:
    assert set(get_args(PolicyName)) == set(POLICY_NAMES)
    assert RouterSettings().policy == DEFAULT_POLICY


def test_every_setting_is_an_option_with_help() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name, field in RouterSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in result.output
        assert field.description


def test_precedence_and_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text("policy: random\nlease_s: 3\nworkers: [a:1]\n")
    monkeypatch.setenv("RADIXFLEET_ROUTER_POLICY", "sglang")
    settings = load(RouterSettings, {"lease_s": "4"}, config)
    assert (settings.policy, settings.lease_s, settings.workers) == ("sglang", 4.0, ("a:1",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "70000"),
        ("policy", "guess"),
        ("heartbeat_timeout_s", "0"),
        ("retry_ratio", "1.5"),
        ("max_message_bytes", "1KB"),
        ("drain_grace_s", "-1"),
        ("breaker_failures", "0"),
        ("workers", "h"),
        ("workers", "h:0"),
        ("workers", "a:1,http://"),
        ("workers", "http://h:0"),
        ("workers", "ftp://h:1"),
    ],
)
def test_a_wrong_value_is_named_at_start(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')} "):
        load(RouterSettings, {name: value})


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        (["--port", "17297", "--metrics-port", "17297"], "--port and --metrics-port are both 17297"),
        (["--metrics-port", "7072"], "--metrics-port and --http-port are both 7072"),
    ],
)
def test_one_port_given_twice_is_refused_before_anything_starts(ports: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ports)
    assert result.exit_code == 2
    assert said in result.output

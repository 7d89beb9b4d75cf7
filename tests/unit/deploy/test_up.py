"""What `radixfleet up` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.commands.up import up

EXAMPLE = Path("deploy/fleet/example.yaml").resolve()


@pytest.mark.parametrize("option", [("--workers", "1"), ("--port", "7070"), ("--log-level", "debug")])
def test_a_fleet_file_leaves_no_option_to_the_command_line(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(up, ["--fleet", str(EXAMPLE), *option])
    assert result.exit_code == 2
    assert f"{option[0]} cannot be given with --fleet" in result.output


@pytest.mark.parametrize("fleet", [("--fleet", str(EXAMPLE)), ("--model", "demo")])
def test_a_folder_that_cannot_be_made_is_one_clear_line(fleet: tuple[str, str]) -> None:
    result = CliRunner().invoke(up, [*fleet, "--run-dir", "/proc/x"])
    assert result.exit_code == 2
    assert "--run-dir /proc/x cannot be written" in result.output


@pytest.mark.parametrize("option", ["--router-metrics-port", "--http-port"])
def test_one_port_given_twice_is_refused_by_the_names_of_its_own_options(option: str) -> None:
    result = CliRunner().invoke(up, ["--model", "demo", "--port", "17297", option, "17297"])
    assert result.exit_code == 2
    assert f"--port and {option} are both 17297" in result.output

"""What `radixfleet up` refuses before anything starts."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.commands.up import up
from deploy.local_fleet import LocalSpec

EXAMPLE = Path("deploy/fleet/example.yaml").resolve()
PORTS = ("--port", "--router-metrics-port", "--http-port")
FREE = tuple(word for option in PORTS for word in (option, "0"))
FLEETS = (("--fleet", "fleet.yaml"), ("--model", "demo", *FREE))
"""A fleet either way, on free ports."""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_fleet("{port: 0, metrics_port: 0, http_port: 0}")


def write_fleet(router_settings: str) -> None:
    models = "{demo: {workers: 1, settings: {model: demo, device: cpu}}}"
    Path("fleet.yaml").write_text(f"routers: {{settings: {router_settings}}}\nmodels: {models}\n")


@pytest.mark.parametrize("option", [("--workers", "1"), ("--port", "7070"), ("--log-level", "debug")])
def test_a_fleet_file_leaves_no_option_to_the_command_line(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(up, ["--fleet", str(EXAMPLE), *option])
    assert result.exit_code == 2
    assert f"{option[0]} cannot be given with --fleet" in result.output


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_folder_that_cannot_be_made_is_one_clear_line(fleet: tuple[str, str]) -> None:
    result = CliRunner().invoke(up, [*fleet, "--run-dir", "/proc/x"])
    assert result.exit_code == 2
    assert "--run-dir /proc/x cannot be written" in result.output


@pytest.mark.parametrize("option", ["--router-metrics-port", "--http-port"])
def test_one_port_given_twice_is_refused_by_the_names_of_its_own_options(option: str) -> None:
    result = CliRunner().invoke(up, ["--model", "demo", "--port", "17297", option, "17297"])
    assert result.exit_code == 2
    assert f"--port and {option} are both 17297" in result.output


@pytest.mark.parametrize("name", ["port", "metrics_port", "http_port"])
def test_a_port_of_a_fleet_file_that_others_have_is_named_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        write_fleet(str({"port": 0, "metrics_port": 0, "http_port": 0, name: port}))
        result = CliRunner().invoke(up, ["--fleet", "fleet.yaml"])
    assert result.exit_code == 2
    assert f"routers.settings.{name} {port} (Address already in use)" in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == [tmp_path / "fleet.yaml"], "no folder for a fleet that does not run"


@pytest.mark.parametrize("option", PORTS)
def test_a_port_that_others_have_is_named_by_its_own_option(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(up, ["--model", "demo", *FREE, option, port])
    assert result.exit_code == 2
    assert f"{option} {port} (Address already in use): choose another one, or 0" in " ".join(result.output.split())


@pytest.mark.parametrize("fleet", FLEETS)
def test_its_folder_is_locked_against_those_who_tidy_up(
    fleet: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of its workers, the admin token and logs lie there as long as it runs."""

    async def keep_up(spec: LocalSpec, *_: object) -> int:
        tidying = os.open(spec.run_dir, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(tidying, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(tidying)
        return 0

    monkeypatch.setattr("deploy.commands.up._keep_up", keep_up)
    monkeypatch.setattr("deploy.commands.up.resolve_model", lambda *_: Path("model"))
    result = CliRunner().invoke(up, [*fleet, "--run-dir", str(tmp_path)], standalone_mode=False)
    assert (result.exception, result.return_value) == (None, 0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LocalSpec]:
    """What `up` would have run."""
    specs: list[LocalSpec] = []

    async def keep_up(spec: LocalSpec, *_: object) -> int:
        specs.append(spec)
        return 0

    monkeypatch.setattr("deploy.commands.up._keep_up", keep_up)
    monkeypatch.setattr("deploy.commands.up.resolve_model", lambda *_: Path("model"))
    return specs


def options_of(arguments: Sequence[str], *names: str) -> list[str]:
    """Values of these options; each stands there once."""
    return [arguments[arguments.index(name) + 1] for name in names if arguments.count(name) == 1]


def test_what_a_settings_file_says_of_threads_and_memory_goes_before_a_workers_share(
    started: list[LocalSpec], tmp_path: Path
) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("model: demo\ndevice: cpu\nthreads: 3\ndevice_memory: 1GiB\n")
    result = CliRunner().invoke(up, ["--config", str(file), "--workers", "2", "--run-dir", str(tmp_path), *FREE])
    assert result.exit_code == 0, result.output
    found = options_of(started[0].worker(1, "127.0.0.1:1").arguments, "--device", "--threads", "--device-memory")
    assert found == ["cpu", "3", str(1 << 30)]


def test_workers_on_the_cpu_need_no_gpu_each_wherever_that_was_said(
    started: list[LocalSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXFLEET_WORKER_DEVICE", "cpu")
    monkeypatch.setattr("deploy.machine.gpu_names", lambda: ["0"])
    result = CliRunner().invoke(up, ["--model", "demo", "--workers", "4", "--run-dir", str(tmp_path), *FREE])
    assert result.exit_code == 0, result.output
    assert started[0].worker(3, "127.0.0.1:1").environment == {}

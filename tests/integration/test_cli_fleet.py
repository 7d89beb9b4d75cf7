"""`radixfleet up` as an operator runs it: real processes, real signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from radixfleet.client import Client
from radixfleet.errors import Unavailable
from radixfleet.types import WorkerStatus
from tests.support.processes import survivors
from tests.support.tiny_model import tiny_model
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RADIXFLEET = (sys.executable, "-m", "deploy.cli")


def command(*arguments: str, timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RADIXFLEET, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


def address(run_dir: Path, name: str) -> str | None:
    path = run_dir / f"{name}.address"
    return path.read_text().strip() if path.exists() else None


async def until_serving(run_dir: Path, count: int) -> str:
    """Wait until the router listens and says that so many workers serve. Returns its address."""
    await until(lambda: address(run_dir, "router"), "the router listens", timeout_s=150)
    endpoint = address(run_dir, "router")
    assert endpoint is not None
    async with asyncio.timeout(150), Client(endpoint) as client:
        while True:
            with suppress(Unavailable):
                workers = [worker.status for worker in await client.list_workers() if worker.connected]
                if workers == [WorkerStatus.SERVING] * count:
                    return endpoint
            await asyncio.sleep(0.1)


def pid_of(fleet: subprocess.Popen[bytes], name: str) -> int | None:
    for process in psutil.Process(fleet.pid).children():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if name in process.cmdline():
                return process.pid
    return None


@pytest.fixture
def up(tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], Path]]]:
    """Starts `radixfleet up` with a tiny model; kills what a failing test leaves."""
    fleets: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        run_dir = tmp_path / f"run-{len(fleets)}"
        command = [*RADIXFLEET, "up", "--model", str(tiny_model()), "--port", "0", "--router-metrics-port", "0"]
        command += ["--http-port", "0", "--run-dir", str(run_dir), "--device", "cpu", "--device-memory", "64MiB"]
        with (tmp_path / f"told-{len(fleets)}").open("wb") as told:
            fleets.append(subprocess.Popen([*command, *arguments], stdout=told, stderr=told))
        return fleets[-1], run_dir

    yield start
    for fleet in fleets:
        if fleet.poll() is None:
            fleet.kill()
        fleet.wait()


async def test_a_fleet_serves_heals_and_ends_without_orphans(up, tmp_path):
    fleet, run_dir = up("--workers", "2")
    endpoint = await until_serving(run_dir, 2)
    listed = command("workers", "--json", "--endpoint", endpoint)
    assert [worker["status"] for worker in json.loads(listed.stdout)["workers"]] == ["serving"] * 2

    answered = command("generate", "--prompt", "Hello", "--max-new-tokens", "4", "--json", "--endpoint", endpoint)
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["worker"] in ("worker-0", "worker-1")

    explained = command("explain", "--prompt", "Hello", "--json", "--endpoint", endpoint)
    assert explained.returncode == 0, explained.stderr
    assert {c["worker_id"] for c in json.loads(explained.stdout)["candidates"]} == {"worker-0", "worker-1"}

    victim = pid_of(fleet, "worker-0")
    os.kill(victim, signal.SIGKILL)
    await until(lambda: pid_of(fleet, "worker-0") not in (None, victim), "worker-0 is started again", timeout_s=150)
    await until_serving(run_dir, 2)
    await until(lambda: "worker-0: serves again" in (tmp_path / "told-0").read_text(), "the operator is told")

    everybody = psutil.Process(fleet.pid).children(recursive=True)
    fleet.send_signal(signal.SIGTERM)
    assert fleet.wait(timeout=120) == 0
    await until(lambda: not survivors(everybody), "all processes have ended")


async def test_a_killed_fleet_leaves_no_process_behind(up):
    """Behaviour 61: kill -9 of the parent takes router, workers, engines and runners with it."""
    fleet, run_dir = up("--workers", "1")
    await until_serving(run_dir, 1)
    everybody = psutil.Process(fleet.pid).children(recursive=True)
    assert len(everybody) >= 4
    fleet.kill()
    fleet.wait()
    await until(lambda: not survivors(everybody), "all processes have ended")


def test_a_fleet_whose_workers_cannot_start_says_why_and_ends(up, tmp_path):
    empty = tmp_path / "model"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    ended = command(
        "up", "--model", str(empty), "--port", "0", "--router-metrics-port", "0", "--http-port", "0", timeout_s=60
    )
    assert ended.returncode == 1
    assert "supported are LlamaForCausalLM" in ended.stderr

"""`--processes`: several routers on the ports of one, which agree about the fleet and end together."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from radixfleet.channel import open_channel
from radixfleet.client import Client
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.fake_worker import FakeWorker, Script
from tests.support.ports import held_port
from tests.support.processes import survivors
from tests.support.router_fixture import NO_RETRY, fake_worker
from tests.support.waiting import until

START_S = 120.0
PROCESSES = 2


@dataclass
class Routers:
    """A supervisor and its processes."""

    supervisor: asyncio.subprocess.Process
    address: str
    metrics_port: int

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.supervisor.pid).children()

    def targets(self) -> list[str]:
        """Where the metrics of all router processes are, by the first one's /sd."""
        groups = json.loads(_get(f"127.0.0.1:{self.metrics_port}", "/sd") or "[]")
        return [group["targets"][0] for group in groups if group["labels"]["role"] == "router"]

    def figures(self, name: str) -> list[float]:
        """The value of one metric in each process that answers."""
        pages = [_get(target, "/metrics") for target in self.targets()]
        found = [re.search(rf"^radixfleet_router_{re.escape(name)} (\S+)$", page, re.MULTILINE) for page in pages]
        return [float(match.group(1)) for match in found if match is not None]

    async def until_figures(self, name: str, test: Any) -> None:
        """Until `test` holds in every process, and all of them answer."""

        def holds() -> bool:
            figures = self.figures(name)
            return len(figures) == PROCESSES and all(test(figure) for figure in figures)

        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(holds):  # noqa: ASYNC110  other processes
                await asyncio.sleep(0.1)


def _get(target: str, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{target}{path}", timeout=60) as response:
            return str(response.read().decode())
    except OSError:
        return ""


@asynccontextmanager
async def router_processes(folder: Path, *arguments: str) -> AsyncIterator[Routers]:
    address_file = folder / "address"
    with held_port() as metrics_port:
        command = ["-m", "router", "--processes", str(PROCESSES), "--port", "0", "--http-port", "-1"]
        command += ["--metrics-port", str(metrics_port), "--address-file", str(address_file), *arguments]
        process = await asyncio.create_subprocess_exec(sys.executable, *command)
        try:
            await until(
                lambda: address_file.exists() or process.returncode is not None,
                "all processes listen",
                timeout_s=START_S,
            )
            yield Routers(process, address_file.read_text().strip(), metrics_port)
        finally:
            if process.returncode is None:
                children = psutil.Process(process.pid).children()
                process.terminate()
                process.terminate()  # a failed test's requests may still run
                await process.wait()
                await until(
                    lambda: not survivors(children), "the processes end with their supervisor", timeout_s=START_S
                )


async def ask(address: str) -> None:
    """One request on a connection of its own, which the kernel gives to either process."""
    async with Client(address, retry=NO_RETRY, timeout_s=60.0) as client:
        await client.complete("hello", max_new_tokens=4)


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await fake_worker("w0").start()
    yield fake
    await fake.kill()


async def register(routers: Routers, worker: FakeWorker) -> None:
    """Tell one process, whichever it is."""
    async with open_channel(routers.address) as channel:
        await fleet_pb2_grpc.FleetStub(channel).Register(fleet_pb2.RegisterRequest(address=worker.address))


async def test_all_processes_know_what_one_is_told_and_all_get_requests(tmp_path: Path, worker: FakeWorker) -> None:
    """Behaviour 51: same worker views. A worker registers at one of them; each lists the metrics of all."""
    async with router_processes(tmp_path) as routers:
        await register(routers, worker)
        await routers.until_figures('workers{status="serving"}', lambda count: count == 1)
        assert len(set(routers.targets())) == PROCESSES

        async with asyncio.timeout(START_S):
            while min(await asyncio.to_thread(routers.figures, 'requests_total{outcome="ok"}')) < 1:
                await ask(routers.address)

        async with open_channel(routers.address) as channel:
            await fleet_pb2_grpc.FleetStub(channel).Remove(fleet_pb2.RemoveRequest(worker_id="w0"))
        await routers.until_figures('workers{status="serving"}', lambda count: count == 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
async def test_a_process_that_ends_is_replaced_and_hears_from_the_others(
    tmp_path: Path, worker: FakeWorker, how: signal.Signals
) -> None:
    async with router_processes(tmp_path) as routers:
        await register(routers, worker)
        await routers.until_figures('workers{status="serving"}', lambda count: count == 1)
        # Its first child has the metrics port that is known; kill another.
        ports = {port: child for child in routers.children() for port in _ports(child)}
        other = next(target for target in routers.targets() if not target.endswith(f":{routers.metrics_port}"))
        victim = ports[int(other.rpartition(":")[2])]
        victim.send_signal(how)
        await until(lambda: not survivors([victim]), "the process is gone", timeout_s=START_S)
        await routers.until_figures('workers{status="serving"}', lambda count: count == 1)
        assert victim not in routers.children()
        assert len(routers.children()) == PROCESSES


async def test_a_drained_worker_goes_back_to_work_everywhere(tmp_path: Path, worker: FakeWorker) -> None:
    """The process that is told to resume may be another than the one that was told to drain."""
    async with router_processes(tmp_path, "--workers", worker.address) as routers:
        await routers.until_figures('worker_eligible{worker="w0"}', lambda value: value == 1)
        drains = [open_channel(routers.address) for _ in range(8)]  # both processes are told, sooner or later
        for channel in drains:
            await fleet_pb2_grpc.FleetStub(channel).Drain(fleet_pb2.DrainWorkerRequest(worker_id="w0"))
            await channel.close(None)
        await routers.until_figures('worker_eligible{worker="w0"}', lambda value: value == 0)
        async with open_channel(routers.address) as channel:
            await fleet_pb2_grpc.FleetStub(channel).Resume(fleet_pb2.ResumeWorkerRequest(worker_id="w0"))
        await routers.until_figures('worker_eligible{worker="w0"}', lambda value: value == 1)


@pytest.mark.parametrize("told", ["the supervisor", "every process"])
async def test_sigterm_drains_all(tmp_path: Path, worker: FakeWorker, told: str) -> None:
    """Behaviour 54. systemd tells every process, and the supervisor passes it on: that is no insistence."""
    finish = asyncio.Event()
    worker.script = lambda _: Script(before_finish=finish)
    async with router_processes(tmp_path, "--workers", worker.address) as routers:
        await routers.until_figures('workers{status="serving"}', lambda count: count == 1)
        children = routers.children()
        running = [asyncio.create_task(ask(routers.address)) for _ in range(8)]
        await until(lambda: worker.count("computed") == len(running), timeout_s=START_S)
        for process in children if told == "every process" else ():
            process.send_signal(signal.SIGTERM)
        routers.supervisor.send_signal(signal.SIGTERM)

        async def refused() -> bool:
            try:
                async with Client(routers.address, retry=NO_RETRY, timeout_s=1.0) as late:
                    await late.model_info()
            except Exception:  # noqa: BLE001  whatever it is
                return True
            return False

        async with asyncio.timeout(START_S):
            while not await refused():  # noqa: ASYNC110  other processes
                await asyncio.sleep(0.05)
        assert not any(task.done() for task in running)
        finish.set()
        await asyncio.gather(*running)
        assert await asyncio.wait_for(routers.supervisor.wait(), START_S) == 0
        assert not survivors(children)


async def test_a_port_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    """Also when it is another router of several processes that has it: requests must not be divided among strangers."""
    async with router_processes(tmp_path) as routers:
        code, errors = await outcome("--port", routers.address.rpartition(":")[2])
        assert code == 1
        assert "cannot listen on 127.0.0.1:" in errors
        assert "Traceback" not in errors


async def test_what_no_process_can_use_ends_all(tmp_path: Path) -> None:
    (tmp_path / "not-a-certificate").write_text("x")
    file = str(tmp_path / "not-a-certificate")
    code, errors = await outcome("--port", "0", "--tls-cert", file, "--tls-key", file)
    assert code == 2
    assert "not-a-certificate" in errors
    assert "Traceback" not in errors


async def outcome(*arguments: str) -> tuple[int | None, str]:
    """Exit code and stderr of routers that do not get far."""
    command = ["-m", "router", "--processes", "2", "--metrics-port", "0", "--http-port", "-1", *arguments]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), START_S)
    return process.returncode, errors.decode()


def _ports(process: psutil.Process) -> list[int]:
    return [connection.laddr.port for connection in process.net_connections("tcp") if connection.status == "LISTEN"]

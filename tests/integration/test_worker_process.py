"""`python -m worker` as an operator runs it: front, engine and runner as processes, signals, children that die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixfleet.channel import open_channel
from radixfleet.errors import Unavailable
from radixfleet.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.answers import collect, generate, read_failure, request
from tests.support.processes import survivors
from tests.support.tiny_model import tiny_model
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

SERVING = health_pb2.HealthCheckResponse.SERVING
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}


@dataclass(slots=True)
class WorkerProcess:
    """A running worker and how to talk to it."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    log: Path

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    def child(self, module: str) -> psutil.Process:
        """The engine's or the runner's process."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if f"worker.engine.{module}" in child.cmdline())

    def health(self) -> HealthWatch:
        return HealthWatch(self.channel)

    async def info(self) -> worker_pb2.WorkerInfo:
        return await worker_pb2_grpc.WorkerStub(self.channel).GetInfo(worker_pb2.GetInfoRequest())


class HealthWatch:
    """Waits for what grpc.health.v1 says of the whole server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

    async def becomes(self, *, serving: bool, within_s: float = 90.0) -> None:
        async with asyncio.timeout(within_s):
            while ((await self._call.read()).status == SERVING) is not serving:
                pass

    def close(self) -> None:
        self._call.cancel()


async def start(tmp_path: Path, *arguments: str) -> asyncio.subprocess.Process:
    with (tmp_path / "log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker", *arguments), stdout=log, stderr=log, env=ENVIRONMENT
        )


@asynccontextmanager
async def running(tmp_path: Path, *arguments: str) -> AsyncIterator[WorkerProcess]:
    """A worker that serves; killed at the end if it still runs, and then nothing of it may be left."""
    address_file = tmp_path / "address"
    network = ("--port", "0", "--metrics-port", "0", "--address-file", str(address_file))
    process = await start(tmp_path, "--model", str(tiny_model()), *network, *arguments)
    log = tmp_path / "log"
    try:
        await until(lambda: address_file.exists() or process.returncode is not None, "the address", timeout_s=60)
        assert process.returncode is None, log.read_text()
        async with open_channel(address_file.read_text().strip()) as channel:
            worker = WorkerProcess(process, channel, log)
            health = worker.health()
            await health.becomes(serving=True, within_s=90)
            health.close()
            children = psutil.Process(process.pid).children()
            assert len(children) == 2
            yield worker
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await until(lambda: not survivors(children), "the end of engine and runner")


async def test_sigterm_drains_then_exits(tmp_path: Path) -> None:
    """Behaviour 54: a real model; the running request finishes, a new one is refused, the exit code is 0."""
    torch = ("--device", "cpu", "--dtype", "float32", "--device-memory", "64MiB", "--threads", "1")
    async with running(tmp_path, *torch, "--served-model-name", "[a]") as worker:
        assert (await generate(worker.inference, "warm up", max_new_tokens=2, ignore_eos=True)).reason == "LENGTH"
        call = worker.inference.Generate(request("hello", max_new_tokens=500, ignore_eos=True))
        await call.initial_metadata()
        health = worker.health()
        worker.process.terminate()
        await health.becomes(serving=False)
        kinds, error = await read_failure(worker.inference.Generate(request("late")))
        assert kinds == []
        assert isinstance(error, Unavailable)
        assert "draining" in str(error)
        answer = await collect(call)
        assert (answer.reason, len(answer.token_ids)) == ("LENGTH", 500)
        async with asyncio.timeout(60):
            assert await worker.process.wait() == 0
    assert not (tmp_path / "address").exists(), "nobody calls it there any more"
    log = worker.log.read_text()
    assert "KV cache" in log, "the memory plan is printed"
    assert "serves [a]" in log, "brackets are no markup: addresses of IPv6 have them"
    assert "1 request finished" in log


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "--runner", "sim") as worker:
        call = worker.inference.Generate(request("endless", max_new_tokens=30_000, ignore_eos=True))
        await call.initial_metadata()
        health = worker.health()
        worker.process.send_signal(signal.SIGINT)
        await health.becomes(serving=False)
        worker.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            assert await worker.process.wait() == 1
        _, error = await read_failure(call)
        assert isinstance(error, Unavailable)


@pytest.mark.parametrize("victim", ["runner_process", "engine_process"])
async def test_a_killed_child_is_seen_and_healed(tmp_path: Path, victim: str) -> None:
    """Behaviour 60: the stream ends with UNAVAILABLE, health flips, and it serves again as a new incarnation."""
    async with running(tmp_path, "--runner", "sim") as worker:
        before = await worker.info()
        health = worker.health()
        await health.becomes(serving=True)
        call = worker.inference.Generate(request("endless", max_new_tokens=30_000, ignore_eos=True))
        await call.initial_metadata()
        async for response in call:
            if response.WhichOneof("event") == "delta":
                break
        worker.child(victim).kill()
        kinds, error = await read_failure(call)
        assert set(kinds) <= {"delta"}, "not finished"
        assert isinstance(error, Unavailable)
        await health.becomes(serving=False)
        await health.becomes(serving=True)
        after = await worker.info()
        assert after.incarnation != before.incarnation
        assert after.capacity == before.capacity
        assert (await generate(worker.inference, "again", max_new_tokens=5, ignore_eos=True)).reason == "LENGTH"
        worker.process.terminate()
        async with asyncio.timeout(60):
            assert await worker.process.wait() == 0


async def test_a_killed_worker_leaves_no_process_behind(tmp_path: Path) -> None:
    """Behaviour 61: engine and runner end with the front, however it ends."""
    async with running(tmp_path, "--runner", "sim") as worker:
        worker.process.kill()
        assert await worker.process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("--model", "/nowhere/at/all"), 2, "no model at /nowhere/at/all"),
        (("--page-size", "24"), 2, "--page-size"),
        (("--no-such-option",), 2, "--no-such-option"),
        (("--runner", "sim", "--host", "203.0.113.7"), 1, "203.0.113.7:0 (Cannot assign requested address)"),
        (("--device", "cpu", "--dtype", "float32", "--device-memory", "1MiB"), 1, "Lower --chunked-prefill-size"),
    ],
    ids=["no model", "bad setting", "unknown option", "no such address", "too little memory"],
)
async def test_what_cannot_start_says_why(
    tmp_path: Path, arguments: tuple[str, ...], exit_code: int, words: str
) -> None:
    """Behaviour 62: one line with what to change, and an exit code that scripts can trust."""
    defaults = ("--model", str(tiny_model()), "--port", "0", "--metrics-port", "0")
    process = await start(tmp_path, *defaults, *arguments)
    async with asyncio.timeout(120):
        assert await process.wait() == exit_code
    log = (tmp_path / "log").read_text()
    assert words in log
    assert "Traceback" not in log


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1", reason="this system refuses no allocation"
)
async def test_memory_that_is_not_there_is_advised_at_start(tmp_path: Path) -> None:
    """Behaviour 62: the allocator refuses the KV pool for real; the stage is named, and the exit code tells."""
    five_machines = str(5 * psutil.virtual_memory().total)
    options = ("--model", str(tiny_model()), "--device", "cpu", "--device-memory", five_machines)
    process = await start(tmp_path, *options, "--port", "0", "--metrics-port", "0", "--max-running-requests", "4")
    async with asyncio.timeout(60):
        assert await process.wait() == 1
    log = (tmp_path / "log").read_text()
    assert "The device refused the KV pool that was planned: it asked for" in log
    assert "lower --mem-fraction-static" in log
    assert "Traceback" not in log

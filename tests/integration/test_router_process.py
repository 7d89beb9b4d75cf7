"""`python -m router` as a process: where it listens, how it ends, what it says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixfleet.channel import open_channel
from radixfleet.client import Client
from radixfleet.errors import Unavailable
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_fixture import NO_RETRY, fake_worker
from tests.support.waiting import until


@dataclass
class Process:
    """A running `python -m router`."""

    process: asyncio.subprocess.Process
    address: str

    async def ended(self) -> tuple[int, str]:
        """Exit code, and what it wrote to stderr."""
        _, errors = await asyncio.wait_for(self.process.communicate(), 60.0)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@asynccontextmanager
async def router_process(tmp_path: Path, *arguments: str) -> AsyncIterator[Process]:
    address_file = tmp_path / "address"
    command = ["-m", "router", "--port", "0", "--metrics-port", "0", "--http-port", "0"]
    command += ["--address-file", str(address_file), *arguments]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    try:
        await until(lambda: address_file.exists() or process.returncode is not None, "the router listens", timeout_s=60)
        yield Process(process, address_file.read_text().strip())
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def serving(address: str) -> None:
    """Wait until the router has a worker."""
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(60):
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
        watch.cancel()


async def read_on(stream: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Read until the stream ends."""
    while await stream.read() is not grpc.aio.EOF:
        pass


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await fake_worker("w0").start()
    yield fake
    await fake.kill()


async def test_sigterm_lets_running_streams_finish_and_takes_nothing_new(tmp_path: Path, worker: FakeWorker) -> None:
    """Behaviour 54: SIGTERM drains; the exit code is 0; one log line a request."""
    finish = asyncio.Event()
    worker.script = lambda _: Script(before_finish=finish)
    async with (
        router_process(tmp_path, "--workers", worker.address, "--log-json") as router,
        Client(router.address, retry=NO_RETRY, timeout_s=60.0) as client,
    ):
        await serving(router.address)
        running = asyncio.create_task(client.complete("hello", request_id="long"))
        await until(lambda: worker.count("computed") == 1)
        router.process.send_signal(signal.SIGTERM)

        assert router.process.stderr is not None
        while b'"draining"' not in await router.process.stderr.readline():
            pass
        async with Client(router.address, retry=NO_RETRY, timeout_s=1.0) as late:
            with pytest.raises(Unavailable):  # noqa: PT012  it is raised within
                while True:  # the line comes a moment before the port is closed
                    await late.model_info()
        assert not running.done()
        finish.set()
        done = await running
        assert len(done.token_ids) == 4
        code, errors = await router.ended()
        assert code == 0
        assert not os.listdir(tmp_path), "nobody calls it there any more"
        lines = [json.loads(line) for line in errors.splitlines()]
        requests = [line for line in lines if line["event"] == "request"]
        assert len(requests) == 1
        expected = {"request_id": "long", "outcome": "ok", "worker": "w0", "reason": "only", "output_tokens": 4}
        assert expected.items() <= requests[0].items()


async def test_the_grace_is_an_end_for_streams_that_do_not_end(tmp_path: Path, worker: FakeWorker) -> None:
    """Behaviour 54: or hit the grace period."""
    worker.script = lambda _: Script(before_finish=asyncio.Event())
    async with (
        router_process(tmp_path, "--workers", worker.address, "--drain-grace-s", "0.3") as router,
        Client(router.address, retry=NO_RETRY, timeout_s=60.0) as client,
    ):
        await serving(router.address)
        running = asyncio.create_task(client.complete("hello"))
        await until(lambda: worker.count("computed") == 1)
        router.process.send_signal(signal.SIGTERM)
        code, _ = await router.ended()
        assert code == 0
        with pytest.raises(Unavailable, match="the router stops after 4 tokens: the answer is not complete"):
            await running
        await until(lambda: worker.count("cancelled") == 1)


async def test_a_second_signal_cuts_the_drain_short(tmp_path: Path, worker: FakeWorker) -> None:
    worker.script = lambda _: Script(before_finish=asyncio.Event())
    async with (
        router_process(tmp_path, "--workers", worker.address, "--drain-grace-s", "600") as router,
        open_channel(router.address) as channel,
    ):
        await serving(router.address)
        prompt = inference_pb2.Prompt(text="hello")
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(prompt=prompt))
        await stream.read()
        router.process.send_signal(signal.SIGTERM)
        router.process.send_signal(signal.SIGINT)
        code, _ = await router.ended()
        assert code == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_on(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_one_who_watches_the_health_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with router_process(tmp_path, "--drain-grace-s", "600") as router, open_channel(router.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        router.process.send_signal(signal.SIGTERM)
        code, _ = await router.ended()
        assert code == 0


async def test_who_watches_the_health_hears_that_the_router_drains(tmp_path: Path, worker: FakeWorker) -> None:
    """Behaviour 60: NOT_SERVING while what runs may finish."""
    finish = asyncio.Event()
    worker.script = lambda _: Script(before_finish=finish)
    async with (
        router_process(tmp_path, "--workers", worker.address, "--drain-grace-s", "600") as router,
        open_channel(router.address) as channel,
        Client(router.address, retry=NO_RETRY, timeout_s=60.0) as client,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        running = asyncio.create_task(client.complete("hello"))
        await until(lambda: worker.count("computed") == 1)
        router.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not running.done()
        finish.set()
        await running
        code, _ = await router.ended()
        assert code == 0


async def test_a_port_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    async with router_process(tmp_path) as first:
        port = first.address.rsplit(":", 1)[1]
        second = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "router",
            "--port",
            port,
            "--metrics-port",
            "0",
            "--http-port",
            "0",
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(second.communicate(), 60)
        assert second.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another" in errors.decode()
        assert "Traceback" not in errors.decode()
        first.process.send_signal(signal.SIGTERM)
        assert (await first.ended())[0] == 0


async def test_a_wrong_setting_is_a_usage_error() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--policy", "guess", stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert "--policy" in errors.decode()

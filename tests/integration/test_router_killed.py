"""What a client is told when the router dies under it, as kill -9 makes it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from radixfleet.answers import Delta
from radixfleet.client import Client
from radixfleet.errors import Unavailable
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_fixture import NO_RETRY, fake_worker
from tests.support.waiting import until

START_S = 120.0


@asynccontextmanager
async def router(folder: Path, worker: FakeWorker) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process, and where it listens."""
    file = folder / "address"
    command = ["-m", "router", "--port", "0", "--metrics-port", "0", "--http-port", "-1", "--log-level", "warning"]
    command += ["--workers", worker.address, "--address-file", str(file)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        await until(file.exists, "the router listens", timeout_s=START_S)
        yield process, file.read_text().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read(client: Client, got: list[int]) -> None:
    """One answer, whose tokens go into `got` as they come."""
    async for event in client.generate("hello", max_new_tokens=8):
        got += event.token_ids if isinstance(event, Delta) else ()


async def test_the_client_says_how_far_the_answer_got_and_what_to_do(tmp_path: Path) -> None:
    """Behaviour 53: an error in words, and never a quiet end."""
    worker = await fake_worker("w0", script=lambda _: Script(tokens=3, before_finish=asyncio.Event())).start()
    try:
        async with router(tmp_path, worker) as (process, address), Client(address, timeout_s=START_S) as client:
            got: list[int] = []
            reading = asyncio.create_task(read(client, got))
            await until(lambda: len(got) == 3, "three tokens came", timeout_s=START_S)
            process.kill()
            with pytest.raises(Unavailable) as caught:
                await reading
            assert f"the connection to {address} broke after 3 tokens: the answer is not complete" in str(caught.value)
            assert "Send the request again" in str(caught.value)
            assert caught.value.metadata["delivered_tokens"] == "3"
            await until(lambda: worker.count("cancelled") == 1, "the worker is told", timeout_s=START_S)
        async with Client(address, retry=NO_RETRY, timeout_s=START_S) as late:
            with pytest.raises(Unavailable, match="onnect"):
                await late.complete("hello")
    finally:
        await worker.kill()

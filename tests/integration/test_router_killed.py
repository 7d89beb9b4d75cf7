"""A router dies as kill -9 makes it: what its client is told, and what its successor knows."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from radixfleet.answers import Delta, FleetReport
from radixfleet.client import Client
from radixfleet.errors import Unavailable
from radixfleet.retry import RetryPolicy
from tests.support.fake_worker import Script
from tests.support.ports import held_port
from tests.support.router_fixture import NO_RETRY, fake_worker
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker

START_S = 120.0
GROUPS, BLOCKS = 6, 14
"""Prompts with nothing in common, and routing blocks in each."""


@asynccontextmanager
async def router(folder: Path, *workers: str, port: int = 0) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process, and where it listens."""
    file = folder / "address"
    command = ["-m", "router", "--port", f"{port}", "--metrics-port", "0", "--http-port", "-1", "--log-level", "error"]
    command += ["--workers", ",".join(workers), "--address-file", str(file)]
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
        async with router(tmp_path, worker.address) as (process, address), Client(address, timeout_s=START_S) as client:
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


async def known_blocks(client: Client) -> dict[str, int]:
    """Of each worker, at the first moment at which the router sends requests to all of them."""
    async with aclosing(client.watch_fleet(timeout_s=START_S)) as reports:
        async for report in reports:
            if not any(worker.ineligible_reason for worker in report.workers):
                return {worker.worker_id: worker.sketch_blocks for worker in report.workers}
    raise AssertionError("the router ended the stream")


async def test_a_router_that_was_killed_and_starts_again_is_right_within_one_digest(tmp_path: Path) -> None:
    """Behaviours 50 and 51: it has forgotten all, and sends each prompt to where it is cached, from the first on."""
    prompts = [[(group * 17 + number) % 250 for number in range(64 * BLOCKS + 4)] for group in range(GROUPS)]
    async with AsyncExitStack() as stack:
        names = [f"w{number}" for number in range(3)]
        workers = [await stack.enter_async_context(sim_worker(worker_id=name)) for name in names]
        addresses = [worker.address for worker in workers]
        async with router(tmp_path, *addresses) as (process, address), Client(address, timeout_s=START_S) as client:
            homes = [(await client.complete(prompt, max_new_tokens=2)).started.worker_id for prompt in prompts]
            assert len(set(homes)) > 1, "or any choice is right"
            process.kill()
        cached = {name: BLOCKS * homes.count(name) for name in names}
        await until(lambda: [len(worker.feed._prefixes.digest()) // 8 for worker in workers] == list(cached.values()))
        (tmp_path / "address").unlink()
        async with router(tmp_path, *addresses) as (_, address), Client(address, timeout_s=START_S) as client:
            assert await known_blocks(client) == cached
            for prompt, home in zip(prompts, homes, strict=True):
                started = (await client.complete(prompt, max_new_tokens=2)).started
                assert started.route is not None
                assert (started.worker_id, started.route.predicted_cached_tokens) == (home, 64 * BLOCKS)
                assert started.cached_tokens == 64 * BLOCKS


async def told_of(reports: AsyncIterator[FleetReport], worker: str) -> bool:
    """Whether there is a report whose only worker this is."""
    async for report in reports:
        if [entry.address for entry in report.workers] == [worker]:
            return True
    return False


async def test_who_watches_hears_of_the_successor_of_a_router_that_was_killed(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [fake_worker(name) for name in ("w0", "w1")]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.kill)
        port = stack.enter_context(held_port())
        before, after = (partial(router, tmp_path, worker.address, port=port) for worker in workers)
        process, address = await stack.enter_async_context(before())
        client = await stack.enter_async_context(Client(address, retry=RetryPolicy(reconnect_s=START_S)))
        reports = await stack.enter_async_context(aclosing(client.watch_fleet(timeout_s=2 * START_S)))
        assert await told_of(reports, workers[0].address)
        process.kill()
        await process.wait()
        (tmp_path / "address").unlink()
        going_on = asyncio.create_task(told_of(reports, workers[1].address))
        await stack.enter_async_context(after())
        assert await going_on

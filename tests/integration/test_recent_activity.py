"""What a worker did reaches those who ask the router: counted in the engine, streamed, summed up, turned into rates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from radixfleet.answers import FleetReport
from radixfleet.client import Client
from radixfleet.overview import overview
from radixfleet.rates import rates
from router.app import running_router
from tests.support.router_fixture import settings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker

SHARED = "what all of them begin with " * 20


@asynccontextmanager
async def fleet(workers: int = 2) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        names = [f"w{index}" for index in range(workers)]
        running = [await stack.enter_async_context(sim_worker(worker_id=name)) for name in names]
        addresses = tuple(worker.address for worker in running)
        router = await stack.enter_async_context(running_router(settings(workers=addresses, heartbeat_timeout_s=20.0)))
        await until(lambda: all(not worker.ineligible_reason for worker in router.registry.workers))
        client = await stack.enter_async_context(Client(router.address, timeout_s=60.0))
        yield client


async def requests_counted(client: Client, count: int) -> FleetReport:
    """The fleet, when its router has heard the end of so many requests."""
    async with asyncio.timeout(60):
        while True:
            report = await client.fleet()
            if report.fleet.recent[-1].totals.finished_requests >= count:
                return report
            await asyncio.sleep(0.05)


async def test_requests_show_up_in_the_worker_and_in_the_fleet():
    async with fleet() as client:
        for number in range(4):
            await client.complete(f"{SHARED}{number}", max_new_tokens=5, ignore_eos=True)
        report = await requests_counted(client, 4)
        seen = overview(report)
        totals = report.fleet.recent[-1].totals
        assert totals.requests == sum(worker.recent[-1].totals.requests for worker in report.workers) == 4
        assert totals.generated_tokens == 20
        assert sum(totals.ttft_counts) == 4
        assert 0 < totals.cached_tokens < totals.prompt_tokens
        assert rates(report.fleet.recent[-1]).hit_rate == seen.fleet.pace.hit_rate
        prompts = report.fleet.recent[-1].prompt_tokens
        assert prompts.asked == totals.prompt_tokens
        assert prompts.actual == totals.cached_tokens
        assert seen.fleet.split is not None
        assert seen.fleet.pace.ttft_p50_s is not None
        assert seen.fleet.pace.output_tokens_per_s > 0


async def test_requests_that_did_not_come_through_the_router_count_for_the_worker_alone():
    async with fleet(1) as client:
        address = (await client.list_workers())[0].address
        async with Client(address) as direct:
            await direct.complete(SHARED, max_new_tokens=3)
        recent = (await requests_counted(client, 1)).workers[0].recent[-1]
        assert recent.totals.prompt_tokens > 0
        assert recent.prompt_tokens.asked == 0

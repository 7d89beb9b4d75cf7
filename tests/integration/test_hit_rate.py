"""The reason for the router: on a fleet whose caches cannot hold all, it decides what is computed twice.

Real router, real workers with a tiny model, real gRPC; all in this process.
"""

import asyncio
from contextlib import AsyncExitStack
from random import Random

import pytest

from loadtest.workloads import Arrival, SharedPrefix, ceiling
from radixfleet.client import Client
from router.app import running_router
from router.config import RouterSettings
from tests.support.tiny_model import tiny_model
from tests.support.waiting import until
from tests.support.worker_fixture import torch_worker

WORKLOAD = SharedPrefix(num_groups=8, prompts_per_group=12, prefix_tokens=400, unique_tokens=24, max_new_tokens=4)
NUM_WORKERS = 4
CONCURRENCY = 8
KV_TOKENS = 3 * (WORKLOAD.prefix_tokens + WORKLOAD.unique_tokens + WORKLOAD.max_new_tokens + 4)
"""Of a worker: three of the eight prefixes, with what belongs to one prompt of each."""


async def hit_rate(policy: str, workers: list[str], arrivals: list[Arrival]) -> float:
    """Share of the prompt tokens that came from the caches, which are emptied first."""
    for address in workers:
        async with Client(address) as worker:
            await worker.flush_cache()
    settings = RouterSettings(port=0, metrics_port=0, http_port=-1, workers=tuple(workers), policy=policy)
    async with running_router(settings, random=Random(1)) as router, Client(router.address) as client:
        await until(lambda: all(not state.ineligible_reason for state in router.registry.workers))
        turn = asyncio.Semaphore(CONCURRENCY)

        async def send(arrival: Arrival) -> tuple[int, int]:
            async with turn:
                done = await client.complete(
                    arrival.token_ids, max_new_tokens=arrival.max_new_tokens, temperature=0, ignore_eos=True
                )
            return done.usage.cached_tokens, done.usage.prompt_tokens

        counts = await asyncio.gather(*(send(arrival) for arrival in arrivals))
    return sum(cached for cached, _ in counts) / sum(prompt for _, prompt in counts)


@pytest.mark.slow
async def test_the_default_policy_hits_at_least_two_and_a_half_times_as_often_as_round_robin():
    arrivals = WORKLOAD.arrivals(vocab_size=512, seed=5)
    async with AsyncExitStack() as stack:
        fleet = [
            await stack.enter_async_context(
                torch_worker(tiny_model(), worker_id=f"worker-{index}", max_total_tokens=KV_TOKENS)
            )
            for index in range(NUM_WORKERS)
        ]
        addresses = [worker.address for worker in fleet]
        by_policy = {policy: await hit_rate(policy, addresses, arrivals) for policy in ("round_robin", "min_cost")}
    print(f"hit rates {by_policy}, ceiling {ceiling(arrivals):.3f}")
    assert 0 < by_policy["round_robin"] < by_policy["min_cost"] <= ceiling(arrivals)
    assert by_policy["min_cost"] >= 2.5 * by_policy["round_robin"], by_policy

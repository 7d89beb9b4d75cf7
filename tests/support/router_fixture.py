"""A router in this process and fake workers behind it, all on ports that the system picks, over real gRPC.

    async with running_fleet(2) as fleet:
        done = await fleet.client.complete("hello")

Leaving the block checks that nothing is left over: no running request, no booking, no lease, and an intact sketch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from radixfleet.client import Client
from radixfleet.clock import Clock
from radixfleet.retry import RetryPolicy
from radixfleet.text import TokenizerSpec
from router.app import Router, running_router
from router.config import RouterSettings
from router.workers.state import WorkerState
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_worker import FakeWorker
from tests.support.waiting import until

NO_RETRY = RetryPolicy(retries=0)


@cache
def spec() -> TokenizerSpec:
    """The tokenizer of all fake workers."""
    return byte_spec()


def fake_worker(worker_id: str = "w0", **fields: Any) -> FakeWorker:
    """A worker that is not started."""
    return FakeWorker(spec(), worker_id=worker_id, **fields)


def settings(**values: Any) -> RouterSettings:
    """For tests: free ports, and waits that are short but no shorter than a busy machine may stall."""
    defaults = {"port": 0, "metrics_port": 0, "http_port": -1, "heartbeat_timeout_s": 15.0, "connect_timeout_s": 5.0}
    return RouterSettings(**(defaults | values))


@dataclass(frozen=True, slots=True)
class Fleet:
    """What `running_fleet` gives."""

    router: Router
    workers: list[FakeWorker]
    client: Client

    def state(self, worker: FakeWorker | int) -> WorkerState:
        """What the router knows of a worker."""
        address = self.workers[worker].address if isinstance(worker, int) else worker.address
        return next(state for state in self.router.registry.workers if state.address == address)

    def eligible(self) -> list[str]:
        """Ids of the workers that get requests."""
        return [state.worker_id for state in self.router.registry.workers if not state.ineligible_reason]

    async def until_eligible(self, *worker_ids: str) -> None:
        """Wait until exactly these workers get requests."""
        await until(lambda: sorted(self.eligible()) == sorted(worker_ids), f"eligible: {worker_ids}")

    def metric(self, name: str, **labels: str) -> float:
        """Value of a counter or gauge `radixfleet_router_<name>`."""
        value = self.router.metrics.registry.get_sample_value(f"radixfleet_router_{name}", labels)
        return 0.0 if value is None else value

    async def until_settled(self) -> None:
        """Wait until no request is left, then check that no counter kept anything of one."""
        await until(lambda: not self.router.log.in_flight, "no request in flight")
        await until(lambda: not len(self.router.look_aside), "no lease held")
        for state in self.router.registry.workers:
            assert state.books.own_requests == 0
            assert state.books.own_tokens == 0
        assert self.router.sketch.open_leases == 0
        self.router.sketch.check()


@asynccontextmanager
async def running_fleet(
    workers: int | Sequence[FakeWorker] = 2, /, *, seed: int = 1, clock: Clock | None = None, **values: Any
) -> AsyncIterator[Fleet]:
    """A router whose `workers` (fake ones, not started, or how many) are eligible. `values`: settings."""
    fakes = [fake_worker(f"w{index}") for index in range(workers)] if isinstance(workers, int) else list(workers)
    try:
        for fake in fakes:
            await fake.start()
        addresses = tuple(fake.address for fake in fakes)
        async with (
            running_router(settings(**{"workers": addresses} | values), clock, Random(seed)) as router,
            Client(router.address, retry=NO_RETRY, timeout_s=60.0) as client,
        ):
            fleet = Fleet(router, fakes, client)
            await fleet.until_eligible(*(fake.worker_id for fake in fakes))
            yield fleet
            await fleet.until_settled()
    finally:
        for fake in fakes:
            await fake.kill()


def scrape(router: Router) -> dict[str, float]:
    """The router's metrics page as sample name with labels -> value. Blocks: call it in a thread."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{router.metrics_port}/metrics", timeout=60) as page:
        text = page.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples

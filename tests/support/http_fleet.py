"""A real router with its HTTP port open, before real workers with a simulated runner; all in this process.

Leaving the block checks that nothing is left over: no running request, no booking, no KV in use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from router.app import Router, running_router
from tests.support.router_fixture import settings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.app import Worker
from worker.runner.protocol import Runner


@dataclass(frozen=True, slots=True)
class HttpFleet:
    """What `http_fleet` gives."""

    router: Router
    workers: list[Worker]

    @property
    def port(self) -> int:
        """Of HTTP."""
        return self.router.http_port

    @property
    def url(self) -> str:
        """What OpenAI's clients take as their base."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def until_settled(self) -> None:
        """Wait until no request is left, then check that no counter kept anything of one."""
        await until(lambda: not self.router.log.in_flight, "no request in flight")
        for state in self.router.registry.workers:
            assert (state.books.own_requests, state.books.own_tokens) == (0, 0)
        assert self.router.sketch.open_leases == 0


@asynccontextmanager
async def http_fleet(num_workers: int = 1, *, runner: Runner | None = None, **values: Any) -> AsyncIterator[HttpFleet]:
    """`runner`: of the first worker. `values`: settings of the router."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(sim_worker(runner if not n else None, worker_id=f"worker-{n}"))
            for n in range(num_workers)
        ]
        addresses = tuple(worker.address for worker in workers)
        router = await stack.enter_async_context(
            running_router(settings(**{"workers": addresses, "http_port": 0, "log_level": "warning"} | values))
        )
        fleet = HttpFleet(router, workers)
        await until(lambda: all(not state.ineligible_reason for state in router.registry.workers), "all workers serve")
        yield fleet
        await fleet.until_settled()

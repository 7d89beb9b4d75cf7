"""The router's health: whether anybody would serve a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from radixfleet.background import beside
from radixfleet.channel import Health
from router.workers.registry import WorkerRegistry

_PERIOD_S = 1.0
"""Eligibility changes with events, and with time, when a breaker's pause is over."""


@asynccontextmanager
async def truthful_health(health: Health, registry: WorkerRegistry, changed: asyncio.Event) -> AsyncIterator[None]:
    """While the block lasts, grpc.health.v1 says SERVING exactly while a worker gets requests.

    `changed` is set whenever a worker came, went or has another status.
    """

    async def follow() -> None:
        was_serving = None
        while True:
            changed.clear()
            serving = any(not worker.ineligible_reason for worker in registry.workers)
            if serving is not was_serving:
                await health.set(serving=serving)
                was_serving = serving
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_S):
                    await changed.wait()

    async with beside(follow(), "health"):
        yield

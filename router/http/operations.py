"""What load balancers, scrapers and tools ask of an HTTP server of models, beside generating."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router.http.errors import json_response
from router.workers.gathering import Gathering
from router.workers.registry import WorkerRegistry

_KNOWN_S = 0.5
"""Workers that are there mostly answer a new process by then; Kubernetes' probes give up after 1 s by default."""


class HealthAnswer(msgspec.Struct):
    """Whether requests are served, and by how many."""

    status: str
    """"serving" or "unavailable"."""
    workers: int
    """That get requests."""


def operations_routes(
    registry: WorkerRegistry, metrics: CollectorRegistry, gathering: Gathering | None
) -> Sequence[BaseRoute]:
    """/health and /metrics. `gathering`: whose end health waits for; None: it tells at once."""

    async def health(_: Request) -> Response:
        if gathering is not None:
            await gathering.until_known(_KNOWN_S)
        serving = sum(not worker.ineligible_reason for worker in registry.workers)
        return json_response(HealthAnswer("serving" if serving else "unavailable", serving), 200 if serving else 503)

    async def scrape(_: Request) -> Response:
        # On a thread: the collector of the fleet's gauges asks this event loop for a sample.
        page = await asyncio.to_thread(generate_latest, metrics)
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [Route("/health", health), Route("/metrics", scrape)]

"""The console's JSON: looking at the fleet, asking where a prompt would go, draining workers.

    GET  /console/api/fleet?since=S           client's door
    POST /console/api/explain                 client's door
    POST /console/api/workers/NAME/drain      admin's door
    POST /console/api/workers/NAME/resume     admin's door

The guard around the whole HTTP application keeps the doors (`router.http.guard`) and refuses what pages of other sites
send. What changes something must, besides, carry a header that no form and no link can send; no cookie counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from radixfleet.compose import generate_request
from radixfleet.errors import InvalidRequest, PermissionDenied
from radixfleet.heard import explanation
from router.api import orders
from router.api.explanation import explain
from router.api.prompts import Prompts
from router.console.feed import Feeder
from router.console.pages import page_routes
from router.dispatch.chooser import Chooser
from router.http.body import parse, read_body
from router.http.errors import json_response
from router.http.guard import CONSOLE_HEADER
from router.workers.registry import WorkerRegistry

_MAX_ORDER_BYTES = 4096
_TOLD_AT_ONCE_S = 1.0
"""An order that is carried out, or fails, within this time is answered with its outcome."""

_log = structlog.get_logger("radixfleet.router.console")


class ExplainOrder(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt: text, or messages of a chat."""

    text: str = ""
    messages: list[dict[str, str]] = []
    model: str = ""
    """"": the only one."""
    cache_salt: str = ""


class DrainOrder(msgspec.Struct, forbid_unknown_fields=True):
    """How to drain."""

    grace_s: float | None = None
    """None: the worker's own setting."""


class OrderAnswer(msgspec.Struct):
    """What became of an order."""

    state: str
    """"draining": it goes on; "drained", "serving"."""
    finished_requests: int = 0
    aborted_requests: int = 0


class Console:
    """The endpoints. On the event loop only."""

    def __init__(
        self, registry: WorkerRegistry, prompts: Prompts, chooser: Chooser, feeder: Feeder, *, max_body_bytes: int
    ) -> None:
        self._registry = registry
        self._prompts = prompts
        self._chooser = chooser
        self._feeder = feeder
        self._max_body_bytes = max_body_bytes
        self._drains: set[asyncio.Task[OrderAnswer]] = set()

    def routes(self) -> Sequence[BaseRoute]:
        """Pages and JSON."""
        return [
            *page_routes(),
            Route("/console/api/fleet", self._fleet),
            Route("/console/api/explain", self._explain, methods=["POST"]),
            Route("/console/api/workers/{name:path}/drain", self._drain, methods=["POST"]),
            Route("/console/api/workers/{name:path}/resume", self._resume, methods=["POST"]),
        ]

    async def _fleet(self, request: Request) -> Response:
        try:
            since_s = float(request.query_params.get("since", "-inf"))
        except ValueError:
            raise InvalidRequest("since must be a number of seconds", field="since") from None
        return json_response(await self._feeder.feed(since_s), headers={"Cache-Control": "no-store"})

    async def _explain(self, request: Request) -> Response:
        body = await read_body(request.receive, request.headers, self._max_body_bytes)
        order = parse(body, ExplainOrder)
        if bool(order.text) is bool(order.messages):
            raise InvalidRequest("give a text or messages, one of them", field="text")
        message = generate_request(order.messages or order.text, {"model": order.model, "cache_salt": order.cache_salt})
        return json_response(explanation(await explain(self._prompts, self._chooser, message)))

    async def _drain(self, request: Request) -> Response:
        _check_header(request)
        body = await read_body(request.receive, request.headers, _MAX_ORDER_BYTES)
        order = parse(body, DrainOrder) if body else DrainOrder()
        orders.check_grace(order.grace_s)
        worker = self._registry.get(request.path_params["name"])

        async def drain() -> OrderAnswer:
            done = await orders.drain(self._registry, worker, order.grace_s)
            state = "serving" if done.resumed else "drained"
            return OrderAnswer(state, done.finished_requests, done.aborted_requests)

        task = asyncio.create_task(drain(), name=f"drain {worker.name}")
        self._drains.add(task)
        task.add_done_callback(self._drained)
        await asyncio.wait([task], timeout=_TOLD_AT_ONCE_S)
        return json_response(task.result()) if task.done() else json_response(OrderAnswer("draining"), 202)

    async def _resume(self, request: Request) -> Response:
        _check_header(request)
        await orders.resume(self._registry, self._registry.get(request.path_params["name"]))
        return json_response(OrderAnswer("serving"))

    def _drained(self, task: asyncio.Task[OrderAnswer]) -> None:
        """Nobody may be waiting for it any more."""
        self._drains.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("drain failed", order=task.get_name(), error=str(error))


def _check_header(request: Request) -> None:
    if request.headers.get(CONSOLE_HEADER) != "1":
        raise PermissionDenied(
            f"send the header {CONSOLE_HEADER}: 1, which shows that no page of another site asks for this"
        )

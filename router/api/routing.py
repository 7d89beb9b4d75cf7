"""Look-aside routing of one request: the one implementation, behind `Fleet.Route` and `Fleet.RouteStream`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from radixfleet import convert
from radixfleet.v1 import fleet_pb2, inference_pb2
from router.api.inference import route_decision
from router.api.prompts import Preparation, Prompts
from router.dispatch.gate import Gate
from router.dispatch.lease import Lease
from router.dispatch.lookaside import LookAside, Owner

Deadline: TypeAlias = Callable[[], float | None]
"""Seconds that the client still waits; None: for ever."""

Answer: TypeAlias = fleet_pb2.RouteResponse
Waiting: TypeAlias = Callable[[], Coroutine[Any, Any, Answer]]


class Routing:
    """Chooses a worker for a request and books it there; its client does the rest. On the event loop only."""

    def __init__(self, prompts: Prompts, gate: Gate, look_aside: LookAside) -> None:
        self._prompts = prompts
        self._gate = gate
        self.look_aside = look_aside

    async def route(self, request: inference_pb2.GenerateRequest, deadline: Deadline) -> Answer:
        """The worker, and the lease. Raises RadixfleetError."""
        answer = self.begin(request, deadline)
        return answer if isinstance(answer, Answer) else await answer()

    def begin(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline, owner: Owner | None = None
    ) -> Answer | Waiting:
        """`route` in this turn of the event loop where nothing has to be waited for, else what is to be awaited.

        The answer has no token ids when `owner` is given and the client sent the prompt as token ids. The lease is
        noted in `owner`. Nothing of `request` is kept. Raises RadixfleetError.
        """
        if self._prompts.awaits(request.model):
            return lambda: self._wait_for_workers(request, deadline, owner)
        preparation = self._prompts.begin(request, look_aside=True)
        echoes = owner is None or not preparation.is_ids
        if preparation.is_short:
            lease = self._gate.enter_at_once(preparation.work())
            if lease is not None:
                return self._booked(lease, owner, echoes=echoes)
        return lambda: self._wait(preparation, deadline, owner, echoes=echoes)

    async def _wait_for_workers(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline, owner: Owner | None
    ) -> Answer:
        """The router has just started."""
        await self._prompts.until_served(request.model)
        preparation = self._prompts.begin(request, look_aside=True)
        return await self._wait(preparation, deadline, owner, echoes=owner is None or not preparation.is_ids)

    async def _wait(self, preparation: Preparation, deadline: Deadline, owner: Owner | None, *, echoes: bool) -> Answer:
        prepared = await self._prompts.finish(preparation)
        return self._booked(await self._gate.enter(prepared, deadline), owner, echoes=echoes)

    def _booked(self, lease: Lease, owner: Owner | None, *, echoes: bool) -> Answer:
        worker = lease.worker
        return Answer(
            worker_id=worker.worker_id,
            address=worker.address,
            lease_id=self.look_aside.hold(lease, owner),
            token_ids=convert.pack_tokens(lease.request.tokens) if echoes else None,
            decision=route_decision(lease.decision),
            lease_s=self.look_aside.lease_s,
        )

"""Look-aside routing of one request: the one implementation, behind `Fleet.Route` and `Fleet.RouteStream`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from radixfleet import convert
from radixfleet.v1 import fleet_pb2, inference_pb2
from router.api.inference import note_decision
from router.api.prompts import Preparation, Prompts
from router.dispatch.dispatcher import Deadline
from router.dispatch.gate import Gate
from router.dispatch.lease import Lease
from router.dispatch.lookaside import LookAside, Owner

Answer: TypeAlias = fleet_pb2.RouteResponse
Waiting: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Routing:
    """Chooses a worker for a request and books it there; its client does the rest. On the event loop only."""

    def __init__(self, prompts: Prompts, gate: Gate, look_aside: LookAside) -> None:
        self._prompts = prompts
        self._gate = gate
        self.look_aside = look_aside

    async def route(self, request: inference_pb2.GenerateRequest, deadline: Deadline) -> Answer:
        """The worker, and the lease. Raises RadixfleetError."""
        answer = Answer()
        waiting = self.begin(request, deadline, answer)
        if waiting is not None:
            await waiting()
        return answer

    def begin(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline, answer: Answer, owner: Owner | None = None
    ) -> Waiting | None:
        """Do `route` in this turn of the event loop if nothing has to be waited for, else return what is to be awaited.

        Fills in `answer`: without token ids when `owner` is given and the client sent the prompt as token ids. The
        lease is noted in `owner`. Nothing of `request` is kept. Raises RadixfleetError.
        """
        if self._prompts.awaits(request.model):
            return lambda: self._wait_for_workers(request, deadline, answer, owner)
        preparation = self._prompts.begin(request, look_aside=True)
        if preparation.is_quick:
            lease = self._gate.enter_at_once(preparation.work())
            if lease is not None:
                self._book(lease, preparation, answer, owner)
                return None
        return lambda: self._wait(preparation, deadline, answer, owner)

    async def _wait_for_workers(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline, answer: Answer, owner: Owner | None
    ) -> None:
        """Route the request once a worker serves its model: the router has just started."""
        await self._prompts.until_served(request.model)
        await self._wait(self._prompts.begin(request, look_aside=True), deadline, answer, owner)

    async def _wait(self, preparation: Preparation, deadline: Deadline, answer: Answer, owner: Owner | None) -> None:
        """Route a request that takes a thread, or a place in the queue."""
        prepared = await self._prompts.finish(preparation)
        self._book(await self._gate.enter(prepared, deadline), preparation, answer, owner)

    def _book(self, lease: Lease, preparation: Preparation, answer: Answer, owner: Owner | None) -> None:
        """Fill in `answer`. In place, for protobuf copies a message into another by writing and reading it."""
        worker = lease.worker
        answer.worker_id = worker.worker_id
        answer.address = worker.address
        answer.lease_id = self.look_aside.hold(lease, owner)
        answer.lease_s = self.look_aside.lease_s
        if owner is None or not preparation.is_ids:
            answer.token_ids.CopyFrom(convert.pack_tokens(lease.request.tokens))
        note_decision(answer.decision, lease.decision)

"""The requests that this worker serves right now: started, aborted by execution id, drained."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog

from radixfleet.errors import Unavailable
from radixfleet.types import ExecutionId, WorkerId, WorkerStatus
from radixfleet.v1 import inference_pb2
from worker.core.messages import Ready
from worker.engine.handle import EngineHandle, RequestStream
from worker.metrics import Outcome
from worker.servicer.acceptance import AcceptedRequest
from worker.servicer.choice import Choice
from worker.servicer.continuation import ended_stream
from worker.servicer.generation import Generation, Identity, Observer
from worker.servicer.intake import Prepared
from worker.servicer.request_trace import RequestTrace

_RETRY_AFTER_S = 1.0
_FLUSH_S = 5.0
"""How long clients may take to read the end of aborted requests."""

_REFUSALS = {
    WorkerStatus.LOADING: "the worker is loading its model; try again soon",
    WorkerStatus.DRAINING: "the worker is draining; send the request to another worker",
    WorkerStatus.FAILED: "the worker's engine has failed{because}; try another worker, or this one later",
}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Drained:
    """How the requests ended that ran when the drain began."""

    finished: int
    """By themselves."""
    aborted: int
    is_resumed: bool
    """The drain was called off: the worker takes requests again, and need not be empty."""


class RunningRequests:
    """Every request from submission until its client has been told its end, or has gone."""

    def __init__(self, worker_id: WorkerId, engine: EngineHandle, observer: Observer) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._observer = observer
        self._running: dict[ExecutionId, Generation] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._resumed = asyncio.Event()
        """Set, and replaced, when a drain is called off."""
        self._is_leaving = False

    def __len__(self) -> int:
        return len(self._running)

    def require_serving(self) -> Ready:
        """What the engine can hold. Raises Unavailable unless the worker takes requests."""
        status = self._observer.feed.status
        if status is not WorkerStatus.SERVING:
            trouble = self._observer.feed.trouble
            because = f" ({trouble})" if trouble and status is WorkerStatus.FAILED else ""
            raise Unavailable(_REFUSALS[status].format(because=because), retry_after_s=_RETRY_AFTER_S)
        return self.require_loaded()

    def require_loaded(self) -> Ready:
        """What the engine found when it loaded. Raises Unavailable before that."""
        ready = self._engine.last_ready
        if ready is None:
            raise Unavailable(_REFUSALS[WorkerStatus.LOADING], retry_after_s=_RETRY_AFTER_S)
        return ready

    def start(self, request: inference_pb2.GenerateRequest, prepared: Prepared, *, arrived_s: float) -> Generation:
        """Submit a request; the caller ends it. Raises Unavailable."""
        self.require_serving()
        texts, ending = prepared.texts, prepared.ending
        uids = [self._engine.next_uid() for _ in texts]
        trace = RequestTrace(arrived_s, self._observer.clock.now())
        if ending is None:
            streams = self._streams(prepared, uids, traced=trace.is_recorded)
        else:
            streams = [ended_stream(uids[0], ending)]
        generation = Generation(
            Identity(ExecutionId(secrets.token_hex(12)), request.request_id, self._worker_id, request.lease_id),
            len(prepared.tokens),
            [Choice(*each) for each in zip(range(len(streams)), streams, texts, strict=True)],
            self._observer,
            generated_tokens=len(prepared.generated),
            arrived_s=arrived_s,
            trace=trace,
            accepted=self._accepted(prepared) if ending is None else None,
        )
        self._running[generation.identity.execution_id] = generation
        self._empty.clear()
        return generation

    def _accepted(self, prepared: Prepared) -> AcceptedRequest:
        return self._observer.feed.accepted(prepared.block_hashes, len(prepared.tokens))

    def end(self, generation: Generation, outcome: Outcome) -> None:
        """The client has been told the end of a request, or, if it has not ended, has gone: then it is aborted."""
        generation.close(outcome)
        identity = generation.identity
        del self._running[identity.execution_id]
        if not self._running:
            self._empty.set()
        _log.debug(
            "request ended",
            request_id=identity.request_id,
            execution_id=identity.execution_id,
            outcome=generation.outcome,
        )

    def abort(self, execution_id: ExecutionId) -> bool:
        """End a request; its client gets Finished{ABORT}. False when no such request is running."""
        generation = self._running.get(execution_id)
        if generation is None or generation.outcome is not None:
            return False
        for uid in generation.uids:
            self._engine.abort(uid)
        return True

    async def drain(self, grace_s: float, *, resumable: bool = False) -> Drained:
        """Take no new requests, and wait for those running; after the grace they are aborted.

        `resumable`: `resume` calls it off; else the worker is about to end, and nothing does.
        """
        self._is_leaving |= not resumable
        self._observer.feed.drain()
        running = len(self._running)
        resumed = self._resumed
        is_empty = await self._is_empty_within(grace_s, resumed)
        if is_empty or (resumed.is_set() and resumable):
            return Drained(running - min(running, len(self._running)), 0, is_resumed=resumed.is_set())
        aborted = sum([self.abort(execution_id) for execution_id in tuple(self._running)])
        if not await self._is_empty_within(_FLUSH_S):
            _log.warning("clients did not read the end of their requests", requests=len(self._running))
        return Drained(running - aborted, aborted, is_resumed=resumed.is_set())

    def resume(self) -> None:
        """Take requests again: a drain that waits ends, and aborts nothing. Raises Unavailable on the way out."""
        if self._is_leaving:
            raise Unavailable("the worker is about to end", retry_after_s=_RETRY_AFTER_S)
        self._resumed.set()
        self._resumed = asyncio.Event()
        self._observer.feed.resume()

    async def _is_empty_within(self, seconds: float, resumed: asyncio.Event | None = None) -> bool:
        """Wait for the last request to end, for so long, or until `resumed` is set."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, resumed) if event is not None]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._empty.is_set()

    def _streams(self, prepared: Prepared, uids: Sequence[int], *, traced: bool) -> list[RequestStream]:
        submit = prepared.submit(uids)
        return self._engine.submit_group(msgspec.structs.replace(submit, traced=True) if traced else submit)

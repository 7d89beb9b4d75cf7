"""What is known of one Generate request at its end: one line in the log, one count in the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from radixfleet.clock import Clock
from radixfleet.counts import counted
from radixfleet.errors import RadixfleetError, Unavailable
from radixfleet.guard import caller_name
from radixfleet.tracing import UNTRACED, Trace
from router.dispatch.lease import Lease
from router.metrics import RouterMetrics

_MAX_ID_LENGTH = 1024
"""Longer ones are refused, and that is logged, too."""
_RETRY_AFTER_S = 1.0
_TRAVEL_S = 0.1
_TRAVEL_SHARE = 0.01
"""gRPC sends timeouts rounded up to two or three digits."""

_log = structlog.get_logger("radixfleet.router.requests")


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes on."""

    request_id: str
    began_at_s: float
    model: str = ""
    worker: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    retries: int = 0
    queued_s: float = 0.0
    """How long it waited here for a worker."""
    first_token_at_s: float | None = None
    trace: Trace = UNTRACED
    is_complete: bool = False
    """The last message was sent: a client that hangs up now has all it asked for."""

    def chosen(self, lease: Lease) -> None:
        """It goes to the lease's worker."""
        self.model = lease.request.model
        self.prompt_tokens = self.prompt_tokens or lease.request.prompt_tokens
        self.worker = lease.worker.name
        self.reason = lease.decision.reason
        self.predicted_tokens = lease.decision.predicted_cached_tokens
        self.queued_s += lease.waited_s
        self.cached_tokens = None


class RequestLog:
    """Follows every Generate request. Counts cancelled ones apart: they are neither successes nor failures."""

    def __init__(self, metrics: RouterMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self.in_flight = 0
        """Requests that have not ended."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_cut = False

    @contextmanager
    def follow(self, request_id: str, deadline: Callable[[], float | None]) -> Iterator[RequestRecord]:
        """For the time of a request; what it raises says how it ended.

        `deadline`: seconds that the client still waits. A client hangs up when they are over; by then its request has
        travelled for a while, so on our clock a little is left.
        """
        waits_s = deadline() or 0.0
        now_s = self._clock.now()
        record = RequestRecord(request_id[:_MAX_ID_LENGTH], now_s, trace=Trace.begin("Generate", now_s, now_s))
        self.in_flight += 1
        self._idle.clear()
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        self._tasks.add(task)
        self._metrics.in_flight.inc()
        outcome = "internal"
        try:
            yield record
            outcome = "ok"
        except asyncio.CancelledError:
            left_s = deadline()
            if record.is_complete:
                outcome = "ok"
            elif self._is_cut:
                outcome = "unavailable"
                task.uncancel()
                raise _cut_off(record) from None
            elif left_s is not None and left_s <= _TRAVEL_S + _TRAVEL_SHARE * waits_s:
                outcome = "deadline_exceeded"
            else:
                outcome = "cancelled"
            raise
        except RadixfleetError as error:
            outcome = error.code.lower()
            raise
        finally:
            self._tasks.discard(task)
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
            self._metrics.in_flight.dec()
            self._end(record, outcome)

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False when the time is over before."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cut(self) -> None:
        """End all running requests, and those to come, with Unavailable: the router stops."""
        self._is_cut = True
        for task in self._tasks:
            task.cancel()

    def first_token(self, record: RequestRecord) -> None:
        """May be called with every token."""
        if record.first_token_at_s is None:
            record.first_token_at_s = self._clock.now()
            self._metrics.ttft_s.observe(record.first_token_at_s - record.began_at_s)
            record.trace.event("first token", record.first_token_at_s)

    def _end(self, record: RequestRecord, outcome: str) -> None:
        now_s = self._clock.now()
        duration_s = now_s - record.began_at_s
        self._metrics.requests.labels(outcome).inc()
        self._metrics.request_s.observe(duration_s)
        ttft_s = None if record.first_token_at_s is None else record.first_token_at_s - record.began_at_s
        _log.info(
            "request",
            request_id=record.request_id,
            outcome=outcome,
            model=record.model,
            worker=record.worker,
            reason=record.reason,
            prompt_tokens=record.prompt_tokens,
            predicted_tokens=record.predicted_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            retries=record.retries,
            queued_s=round(record.queued_s, 4),
            ttft_s=None if ttft_s is None else round(ttft_s, 4),
            duration_s=round(duration_s, 4),
            **({"key": key} if (key := caller_name()) else {}),
            **({"trace_id": record.trace.trace_id} if record.trace.is_recorded else {}),
        )
        _end_trace(record, outcome, now_s)


def _end_trace(record: RequestRecord, outcome: str, now_s: float) -> None:
    record.trace.note(
        gen_ai__request__model=record.model,
        gen_ai__usage__input_tokens=record.prompt_tokens,
        gen_ai__usage__output_tokens=record.output_tokens,
        radixfleet__request_id=record.request_id,
        radixfleet__outcome=outcome,
        radixfleet__retries=record.retries,
    )
    record.trace.end(now_s, "" if outcome in ("ok", "cancelled") else outcome)


def _cut_off(record: RequestRecord) -> Unavailable:
    return Unavailable(
        f"the router stops after {counted(record.output_tokens, 'token')}: the answer is not complete",
        retry_after_s=_RETRY_AFTER_S,
        delivered_tokens=str(record.output_tokens),
    )

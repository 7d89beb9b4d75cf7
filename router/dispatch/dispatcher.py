"""Carries one request: wait for a worker, forward, retry where that is harmless, settle.

    enter --> forward --> settled
      ^           |
      +-- failed before its first token: on another worker, within the budget; or in the middle of an answer that may
          be resumed: on another worker, as long as that gets on

The client sees one Started, whichever try it belongs to: it is held back until the first token, or the end, of its own
try is there. After the first token there is another try only where the client asked for it (`resume`), from the tokens
that it has got. The budget is for retries that nobody asked for: it neither bounds resumptions nor pays for them. They
end when `max_retries` + 1 of them in a row were lost before `HEADWAY_TOKENS`, so that a request that kills its workers
does not kill them all. Without `resume`, a worker that is lost ends the stream with an error that says how many tokens
were delivered.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import structlog

from radixfleet.clock import Clock
from radixfleet.counts import counted
from radixfleet.errors import InvalidRequest, Overloaded, RadixfleetError, Unavailable
from radixfleet.tracing import SpanKind
from radixfleet.types import TokenArray
from router.dispatch.gate import Gate
from router.dispatch.lease import NO_TOKENS, Decision, Lease, Verdict
from router.dispatch.link import LinkFailure, Reply, WorkerLink
from router.dispatch.record import RequestLog, RequestRecord
from router.dispatch.request import PreparedRequest
from router.dispatch.retry import Failures, RetryBudget
from router.metrics import RouterMetrics
from router.workers.state import WorkerState

_SILENCE_S = 1.0
"""A deadline counts against a worker that said nothing for so long; a shorter deadline is the client's choice."""

_RETRY_AFTER_S = 1.0

_log = structlog.get_logger("radixfleet.router.dispatch")

Send: TypeAlias = Callable[[Reply, Decision, int], Awaitable[None]]
"""Passes a reply on to the client: the reply, how its worker was chosen, how often the request was tried before."""

Deadline: TypeAlias = Callable[[], float | None]
"""Seconds that the client still waits; None: for ever."""


@dataclass(slots=True)
class _Try:
    """One request on one worker."""

    lease: Lease
    num_tokens: int = 0
    """Generated so far, in all completions."""
    first_output: array[int] = field(default_factory=lambda: array("I"))
    """Tokens of completion 0, which the next turn of a chat most likely continues."""
    held: Reply | None = None
    """The Started message, which is held back until another message follows it."""
    is_visible: bool = False
    """The client has been sent something of the answer, now or by an earlier try."""
    suspects: list[WorkerState] = field(default_factory=list)
    """Workers that gave no right answer to it, which may be its own fault: not where another worker answers."""

    @property
    def output(self) -> TokenArray:
        """`first_output` as an array. The try must be over: an array that is looked at cannot grow."""
        return np.frombuffer(self.first_output, dtype=np.uint32) if self.first_output else NO_TOKENS


class Dispatcher:
    """One for the router; holds nothing of a request between calls."""

    def __init__(
        self,
        gate: Gate,
        link: Callable[[WorkerState], WorkerLink],
        *,
        max_retries: int,
        retry_ratio: float,
        log: RequestLog,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        """`link`: how to reach a worker."""
        self._gate = gate
        self._link = link
        self._max_retries = max_retries
        self._budget = RetryBudget(retry_ratio)
        self._log = log
        self._metrics = metrics
        self._clock = clock

    async def run(self, request: PreparedRequest, record: RequestRecord, send: Send, deadline: Deadline) -> None:
        """Carry `request` to its end. Raises RadixfleetError when that is a failure."""
        self._budget.earn()
        failures = Failures()
        is_visible = False
        began_s = self._clock.now()
        record.trace.span("prepare", record.began_at_s, began_s)
        lease = await self._gate.enter(request, deadline)
        while True:
            record.chosen(lease)
            _trace_route(record, lease, began_s, self._clock.now())
            attempt = _Try(lease, is_visible=is_visible, suspects=failures.suspects)
            try:
                await self._forward(attempt, record, send, deadline())
            except LinkFailure as failure:
                _warn(failure, attempt)
                failures.add(lease.worker, attempt.num_tokens, was_resumed=is_visible)
                if failure.kind == "fault":
                    failures.suspects.append(lease.worker)
                is_visible = attempt.is_visible
                began_s = self._clock.now()
                lease = self._next(failure, attempt, record, failures)
            else:
                return

    def _next(self, failure: LinkFailure, attempt: _Try, record: RequestRecord, failures: Failures) -> Lease:
        """Another worker for the request, booked; or raise what the client is to hear."""
        request = attempt.lease.request
        # An engine that told text alone leaves nothing from which another could go on.
        can_resume = request.resumable and len(attempt.first_output) == attempt.num_tokens
        if attempt.is_visible:
            is_allowed = can_resume and failures.in_vain <= self._max_retries
        else:
            is_allowed = len(failures.workers) <= self._max_retries
        if not is_allowed or not _is_harmless(failure):
            raise _error(failure, attempt, record) from failure
        if not attempt.is_visible and not self._budget.spend():
            self._metrics.retries.labels("refused").inc()
            raise _unaffordable(failure.error) from failure
        going_on = request.continued(attempt.output) if attempt.num_tokens else request
        try:
            lease = self._gate.enter_again(going_on, failures.workers)
        except Unavailable:
            if not attempt.is_visible:
                self._budget.give_back()
            raise _error(failure, attempt, record) from failure
        record.retries += 1
        self._metrics.retries.labels("resumed" if attempt.is_visible else "retried").inc()
        return lease

    async def _forward(self, attempt: _Try, record: RequestRecord, send: Send, timeout_s: float | None) -> None:
        """One try. Whatever happens, its lease is settled at the end. Raises LinkFailure."""
        lease = attempt.lease
        verdict = Verdict.UNKNOWN  # also when the client leaves
        sent_at_s = self._clock.now()
        span = record.trace.child("forward", sent_at_s, SpanKind.CLIENT)
        span.note(radixfleet__worker=lease.worker.name, server__address=lease.worker.address)
        error = ""
        try:
            with span.current():
                async with aclosing(self._link(lease.worker).generate(lease.request, timeout_s)) as replies:
                    async for reply in replies:
                        if not self._take(reply, attempt, record):
                            continue
                        attempt.is_visible = True
                        if attempt.held is not None:
                            held, attempt.held = attempt.held, None
                            await send(held, lease.decision, record.retries)
                        await send(reply, lease.decision, record.retries)
                        record.is_complete = reply.kind == "end"
            verdict = Verdict.ANSWERED
        except LinkFailure as failure:
            error = str(failure)
            was_silent = not lease.is_started and self._clock.now() - sent_at_s >= _SILENCE_S
            if failure.kind == "answer":
                verdict = Verdict.ANSWERED
            elif failure.kind == "transport" or (failure.kind == "deadline" and was_silent):
                verdict = Verdict.FAILED
            raise
        finally:
            lease.settle(verdict, attempt.output)
            span.end(self._clock.now(), error)

    def _take(self, reply: Reply, attempt: _Try, record: RequestRecord) -> bool:
        """Account for a reply. False: it is held back."""
        lease = attempt.lease
        if reply.kind == "started":
            if not reply.message.started.is_whole:
                lease.started(reply.cached_tokens)
            record.cached_tokens = reply.cached_tokens
            attempt.held = None if attempt.is_visible else reply
            return False
        self._blame(attempt.suspects)
        count = reply.num_tokens
        if count:
            if not attempt.num_tokens:
                lease.first_token()
                self._log.first_token(record)
            attempt.num_tokens += count
            record.output_tokens += count
            if not reply.index:
                attempt.first_output.extend(reply.token_ids)
        elif reply.kind == "end" and record.cached_tokens is None and reply.cached_tokens is not None:
            lease.receipt(reply.cached_tokens, reply.message.finished.usage.prompt_tokens)
            record.cached_tokens = reply.cached_tokens
        return True

    def _blame(self, workers: list[WorkerState]) -> None:
        """Another worker answers what they did not."""
        for worker in workers:
            worker.breaker.failure(sent_at_s=self._clock.now(), probe=False)
            worker.changed()
        workers.clear()


def _trace_route(record: RequestRecord, lease: Lease, began_s: float, now_s: float) -> None:
    """How the worker was chosen, and after what wait."""
    if not record.trace.is_recorded:
        return
    span, decision = record.trace.child("route", began_s), lease.decision
    if lease.waited_s:
        span.span("queue", now_s - lease.waited_s, now_s)
    span.note(
        radixfleet__worker=lease.worker.name,
        radixfleet__policy=decision.policy,
        radixfleet__reason=decision.reason,
        radixfleet__predicted_cached_tokens=decision.predicted_cached_tokens,
        radixfleet__reachable_cached_tokens=decision.reachable_cached_tokens,
    )
    span.end(now_s)


def _is_harmless(failure: LinkFailure) -> bool:
    """Whether another worker may do better: not where the request itself, or its deadline, is at fault."""
    return failure.kind in ("transport", "fault") or (
        failure.kind == "answer" and isinstance(failure.error, Unavailable | Overloaded)
    )


def _error(failure: LinkFailure, attempt: _Try, record: RequestRecord) -> RadixfleetError:
    """What the client hears of a request that will not be tried again."""
    delivered = record.output_tokens
    if not delivered or not (failure.kind == "transport" or isinstance(failure.error, Unavailable)):
        return failure.error
    told, name = failure.error, attempt.lease.worker.name
    # A worker that says why it stops is there, if not its engine; only one that says nothing more was lost.
    what = "was lost" if failure.kind == "transport" else "stopped"
    why = "" if failure.kind == "transport" else f" ({told})"
    return Unavailable(
        f"worker {name} {what} after {counted(delivered, 'token')}: the answer is not complete{why}",
        retry_after_s=_RETRY_AFTER_S if told.retry_after_s is None else told.retry_after_s,
        delivered_tokens=str(delivered),
    )


def _unaffordable(error: RadixfleetError) -> RadixfleetError:
    """The same, to a client whose request was not tried again because too many others were.

    Of harmless failures alone, whose errors are made of a message, a time and numbers.
    """
    text = f"{error} (not tried on another worker: the fleet's budget for retries is spent; see --retry-ratio)"
    return type(error)(text, retry_after_s=error.retry_after_s, **error.metadata)


def _warn(failure: LinkFailure, attempt: _Try) -> None:
    by_client = isinstance(failure.error, InvalidRequest)
    _log.log(
        logging.INFO if by_client else logging.WARNING,
        "request failed at worker",
        request_id=attempt.lease.request.request_id,
        worker=attempt.lease.worker.name,
        kind=failure.kind,
        detail=str(failure),
        delivered_tokens=attempt.num_tokens,
    )

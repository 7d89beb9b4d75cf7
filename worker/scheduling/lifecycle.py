"""Every request from its submission to its end, and what the front is to be told of it.

A request has one terminal outcome, told by `end` whatever its state. What it holds is released in `_retire` alone,
when none of its launched steps is unsettled: a step in flight never sees its rows or pages in other hands.

Used by the scheduler and its parts alone.
"""

from __future__ import annotations

from radixfleet.clock import Clock
from radixfleet.types import FinishReason
from worker.core.messages import Admitted, Ended, StepOutputs
from worker.memory.advisor import Advice, Bound, Shortage, Stage, advise
from worker.scheduling.admission import Admission
from worker.scheduling.counters import Counters
from worker.scheduling.holdings import Holdings
from worker.scheduling.limits import Limits
from worker.scheduling.request import Request, State
from worker.scheduling.running import Running
from worker.scheduling.shortages import Shortages


class Lifecycle:
    """See the head of the module."""

    def __init__(
        self,
        limits: Limits,
        holdings: Holdings,
        admission: Admission,
        counters: Counters,
        shortages: Shortages,
        clock: Clock,
    ) -> None:
        self.requests: dict[int, Request] = {}
        """Requests that have not ended, by uid."""
        self.running = Running(limits.num_rows)
        """Requests in the states PREFILL and DECODE."""
        self.leaving: set[Request] = set()
        """Requests in the states RETRACTED and FINISHED that still have steps in flight."""
        self.left_rows: list[int] = []
        """Rows with edits whose requests have left them since the last plan."""
        self.outbox = StepOutputs([], [], [])
        self._limits = limits
        self._holdings = holdings
        self._admission = admission
        self._counters = counters
        self._shortages = shortages
        self._clock = clock

    def take_outbox(self) -> StepOutputs | None:
        """All that the front has not been told yet, in order; None when there is nothing."""
        outbox = self.outbox
        if not (outbox.admitted or outbox.outputs or outbox.ended or outbox.prompt_logprobs or outbox.chunks):
            return None
        self.outbox = StepOutputs([], [], [])
        return outbox

    def begin(self, request: Request) -> None:
        """A request was admitted. Only its first admission is counted and told, not those after retractions."""
        self.running.add(request)
        if request.was_admitted:
            return
        request.was_admitted = True
        cached_tokens = request.held.matched
        self._counters.admitted_requests += 1
        self._counters.prompt_tokens += len(request.fill_ids)
        self._counters.cached_tokens += cached_tokens
        self.outbox.admitted.append(Admitted(request.uid, cached_tokens, self._clock.now()))

    def finish(self, request: Request, reason: FinishReason, matched_token_id: int | None = None) -> None:
        """A request ends because it is complete."""
        self._counters.finished_requests += 1
        self._learn_growth(request)
        self._end(request, Ended(request.uid, reason, matched_token_id=matched_token_id))

    def abort(self, request: Request) -> None:
        """A request ends because its client or its front wants no more of it."""
        self._counters.aborted_requests += 1
        if request.outputs:
            # As a rule its front found a stop string.
            self._learn_growth(request)
        self._end(request, Ended(request.uid, FinishReason.ABORT))

    def fail_step_of(self, request: Request, cause: str, *, is_alone: bool) -> None:
        """A step of the request failed, for its row alone or for all in it: nothing more of it is cached.

        Which of its steps a NaN comes from is not known: chunks before the last show none. So what is cached of it goes
        too, or all who send the same prompt would fail.
        """
        request.is_poisoned = True
        request.gave_nan |= is_alone and not cause
        if request.state is not State.FINISHED:
            alone = cause or "the model gave it no valid probabilities (NaN)"
            why = alone if is_alone else "the device could not compute its step"
            self._fail(request, "INTERNAL", f"{why}; other requests go on, and this one may be sent again")

    def fail_outgrown(self, request: Request) -> None:
        """It is alone, and the pool is too small for its next token."""
        limits = self._limits
        shortage = Shortage(request.planned + 1, limits.kv_tokens, Bound.ONE_REQUEST, kv_bound=limits.kv_bound)
        self._fail(request, "RESOURCE_EXHAUSTED", advise(Stage.KV_FULL, shortage).text)

    def give_up(self, request: Request, advice: Advice) -> None:
        """Fail a request for which there is no memory even when it runs alone."""
        self._fail(request, "RESOURCE_EXHAUSTED", f"the request does not run even alone, token by token. {advice.text}")

    def retract(self, victim: Request) -> None:
        """Send a request back to the queue, once its launched steps have settled; it is continued later."""
        self._counters.retractions += 1
        victim.state = State.RETRACTED
        self._leave(victim)

    def settled(self, request: Request) -> None:
        """A launched step with it has settled."""
        if not request.in_flight and request in self.leaving:
            self._retire(request)

    def pages_released_by(self, ending: list[Request]) -> int:
        """Pages that can be had once what is in flight has settled, of `ending` and of requests that are leaving."""
        return sum(self._holdings.pages_released_by(request.held) for request in [*ending, *self.leaving])

    def _learn_growth(self, request: Request) -> None:
        self._admission.growth_share.ended(len(request.outputs) / request.submit.max_new_tokens)

    def _fail(self, request: Request, code: str, message: str) -> None:
        self._counters.failed_requests += 1
        self._end(request, Ended(request.uid, None, code=code, message=message))

    def _end(self, request: Request, ended: Ended) -> None:
        """The one terminal outcome of a request, whatever its state."""
        del self.requests[request.uid]
        if not self.requests:
            self._shortages.ended(Stage.KV_FULL)
        self.outbox.ended.append(ended)
        before, request.state = request.state, State.FINISHED
        if before is State.WAITING:
            self._admission.queue.remove(request)
        elif before is not State.RETRACTED:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Plan it no more; it retires now, or when its launched steps have settled."""
        self.running.remove(request)
        self.leaving.add(request)
        if not request.in_flight:
            self._retire(request)
        elif request.state is State.FINISHED:
            # Who answers at once, as agents do, goes on from this answer while the step in flight is computed.
            self._keep(request)

    def _keep(self, request: Request) -> None:
        """Its computed KV goes to the cache, that of generated tokens included.

        The KV of the last token was not computed, and that of a token which was dropped is not kept.
        """
        if not request.is_poisoned:
            self._holdings.keep(request.held, request.history(request.settled))

    def _retire(self, request: Request) -> None:
        """Release all that a request holds: the one place. No launched step reads or writes any of it any more."""
        assert not request.in_flight
        assert not request.samples_in_flight
        self._keep(request)
        if request.submit.edits is not None:
            self.left_rows.append(request.held.row)
        self._holdings.release(request.held, forget=request.gave_nan)
        request.holding = None
        self.leaving.remove(request)
        if request.state is State.RETRACTED:
            request.state = State.WAITING
            request.refill()
            self._admission.enqueue(request)

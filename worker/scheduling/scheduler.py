"""The scheduler: decides what each step computes, and books what came of it. Pure: no torch, no I/O, time passed in.

    submit, abort, flush    what the front asks
    plan()                  the next step, as frozen data; it counts as launched from here on
    commit(result)          settles the oldest launched step; results come strictly in order
    drain()                 what to tell the front since it was last asked

    shortages               episodes in which memory ran short, with advice for the operator

Nothing else changes its state. One thread, the engine's. Its parts: `Admission` (who leaves the queue), `Scarcity` (who
gives way), `Settling` (what came of a step), `Lifecycle` (where each request stands), `Recovery` (no memory).

Overlap needs no code of its own. Step N+1 may be planned before step N is committed: its decodes take their input
from the runner's relay, as they always do. A serial loop commits each step before it plans the next, by the same
code, and gets the same tokens.

A step is made in this order:
1. Every request in DECODE computes one token, unless its last token by length is in flight already. Where pages are
   short, some give way: see `scarcity`.
2. Prompts that are begun go on, oldest first, by at most `Limits.prefill_budget` tokens together.
3. With what is left of the budget, requests are admitted from the queue (`Admission`).
4. With preemption: where the next in the queue found no row or no room, one running request of lower priority gives way
   once it has settled what it computes in this step.

A token that arrives after its request has ended is counted, and dropped. A step for which the device had no memory is
taken back and tried again smaller: see `recovery`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

import msgspec
import numpy as np

from radixfleet.clock import Clock
from radixfleet.types import FinishReason, Load
from worker.core.messages import Ended, StepOutputs, Submit
from worker.core.step import StepPlan, StepResult
from worker.memory.advisor import Advice, Stage
from worker.memory.page_allocator import PageAllocator
from worker.memory.radix_cache import RadixCache
from worker.memory.req_to_token import ReqToTokenPool
from worker.scheduling.admission import Admission
from worker.scheduling.assembly import Decodes, Launched, Piece, assemble, row_start
from worker.scheduling.counters import Counters
from worker.scheduling.holdings import Holdings
from worker.scheduling.invariants import checks
from worker.scheduling.leap import TokensAhead, leap, steps_ahead
from worker.scheduling.lifecycle import Lifecycle
from worker.scheduling.limits import Limits
from worker.scheduling.prefill import plan_chunks
from worker.scheduling.recovery import Recovery
from worker.scheduling.request import Request, State
from worker.scheduling.rows import RowIndex
from worker.scheduling.scarcity import Scarcity
from worker.scheduling.settling import Settling
from worker.scheduling.shortages import Shortages


class Scheduler:
    """See the head of the module."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        """Makes its own allocator, table and cache, empty, in the sizes that `limits` gives."""
        self.limits = limits
        self.counters = Counters()
        allocator = PageAllocator(limits.num_pages, limits.page_size)
        self.cache = RadixCache(allocator)
        table = ReqToTokenPool(limits.num_rows, limits.max_context_tokens, limits.page_size)
        self.holdings = Holdings(allocator, table, self.cache)
        self._admission = Admission(limits, self.holdings)
        self._launched: deque[Launched] = deque()
        self._num_planned = 0
        self._num_submitted = 0
        self.shortages = Shortages()
        self._recovery = Recovery(limits, self.counters, self.shortages)
        self._lifecycle = Lifecycle(limits, self.holdings, self._admission, self.counters, self.shortages, clock)
        self._scarcity = Scarcity(
            limits, self.holdings, self._admission, self._lifecycle, self.counters, self.shortages
        )
        self._settling = Settling(self.holdings, self._lifecycle, self.counters)

    def submit(self, submit: Submit) -> None:
        """Queue a request and its children, or refuse them at once when they can never fit. Their uids must be new."""
        refusal = self.limits.refusal(len(submit.token_ids), submit.max_new_tokens)
        parent = None
        for each in (submit, *_children(submit)):
            assert each.uid not in self._lifecycle.requests, f"uid {each.uid} is in use"
            if refusal is not None:
                self.counters.refused_requests += 1
                self._lifecycle.outbox.ended.append(Ended(each.uid, None, code="INVALID_ARGUMENT", message=refusal))
                continue
            self._num_submitted += 1
            request = Request(each, arrival=self._num_submitted, fill_ids=each.token_ids, parent=parent)
            parent = parent or request
            if each.prompt_logprobs is not None and len(each.token_ids) > 1:
                request.next_prompt_logprob = 1
            self._lifecycle.requests[each.uid] = request
            self._admission.enqueue(request)

    def abort(self, uid: int) -> None:
        """End a request in whatever state it is. An unknown uid, or one that has ended, is no error."""
        request = self._lifecycle.requests.get(uid)
        if request is not None:
            self._lifecycle.abort(request)

    def flush(self) -> tuple[int, int]:
        """Drop all cached prefixes that no request uses: tokens dropped, tokens that requests keep.

        What a request uses stays valid and can be matched by others; so does what one that is leaving uses.
        """
        dropped = self.cache.flush()
        return dropped * self.limits.page_size, self.holdings.used_pages * self.limits.page_size

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can be computed before a launched step has settled, or at all."""
        running, size = self._lifecycle.running, self._recovery.size
        seated = self._recovery.seated(running.rows, self.holdings.rows)
        begun = running.at(seated[self.holdings.rows.is_decoding[seated] == 0])
        decodes = self._plan_decodes(seated)
        begun = [request for request in begun if request.state is State.PREFILL and not request.stale_steps]
        chunks = [Piece(each, each.planned, 1, samples=True) for each in begun if each.resumes_decoding]
        num_decodes = len(decodes.rows) + len(chunks)
        budget = min(self.limits.prefill_budget(num_decodes), size.prompt_tokens.now)
        begun = [request for request in begun if not request.resumes_decoding]
        begun_chunks = plan_chunks(begun, budget, self.limits.page_size)
        chunks += begun_chunks
        begun_tokens = sum(piece.length for piece in begun_chunks)
        seats = size.sequences.now - len(decodes.rows) - len(chunks)
        admitted = self._admission.admit(running, budget - begun_tokens, seats, begun_tokens=begun_tokens)
        for piece in admitted:
            self._lifecycle.begin(piece.request)
        chunks += admitted
        plan = None
        if len(decodes.rows) or chunks:
            plan = self._launch(decodes, chunks, [piece.request for piece in admitted])
        if self.limits.preempt:
            self._scarcity.preempt()
        return plan

    def commit(self, result: StepResult) -> None:
        """Settle the oldest launched step."""
        assert self._launched, f"step {result.step} has a result but was not launched"
        assert self._launched[0].step == result.step, f"step {result.step} settles before {self._launched[0].step}"
        launched = self._launched.popleft()
        self._settling.settle(launched, result, self._learn_from(result, launched))

    def steps_ahead(self) -> int:
        """Steps that are sure to only decode, so that `leap` may do them at once; 0 while a step is in flight."""
        if self._launched or not self._recovery.size.is_full:
            return 0
        running = self._lifecycle.running
        may_admit = len(self._admission.queue) > 0 and self._admission.places(running) > 0
        return steps_ahead(running, self.holdings, may_admit=may_admit)

    def leap(self, num_steps: int, tokens_ahead: TokensAhead) -> None:
        """Decode `num_steps` steps, at most `steps_ahead`, as planning and committing each would. For simulations.

        The front is told which requests end with the last step, but not the tokens: who leaps knows them.
        """
        assert not self._launched, "a leap begins between two steps"
        running = self._lifecycle.running
        leap(running, self.holdings, num_steps, tokens_ahead)
        self._num_planned += num_steps
        for _ in range(num_steps):
            self._step_planned()
        self.counters.launched(len(running), 0, steps=num_steps)
        self.counters.generated_tokens += num_steps * len(running)
        for request in running.at(running.rows[self.holdings.rows.to_sample[running.rows] == 0]):
            self._lifecycle.finish(request, FinishReason.LENGTH)

    @property
    def running_uids(self) -> Collection[int]:
        """Requests that hold memory and have not ended, in the order of admission."""
        return self._lifecycle.running.uids

    @property
    def context_tokens(self) -> int:
        """Tokens that a step reads in which every running request decodes."""
        rows = self._lifecycle.running.rows
        return int(self.holdings.rows.planned[rows].sum()) + len(rows)

    def drain(self) -> StepOutputs | None:
        """All that the front has not been told yet, in order; None when there is nothing."""
        return self._lifecycle.take_outbox()

    @property
    def step_limits(self) -> tuple[int, int]:
        """Prompt tokens in chunks, and sequences, that a step may have now."""
        return self._recovery.size.prompt_tokens.now, self._recovery.size.sequences.now

    @property
    def has_work(self) -> bool:
        """Some request has not ended, or some launched step is not settled."""
        return bool(self._lifecycle.requests or self._launched)

    def load(self) -> Load:
        """The load now. Cached prefixes that no request uses do not count as load."""
        queue = self._admission.queue
        rows, columns = self._lifecycle.running.rows, self.holdings.rows
        computing = int(np.maximum(columns.filled[rows] - columns.settled[rows], 0).sum())
        return Load(
            running_requests=min(len(self._lifecycle.running), self.limits.max_running_requests),
            waiting_requests=len(queue),
            outstanding_prompt_tokens=queue.prompt_tokens + computing,
            kv_protected_tokens=self.holdings.used_pages * self.limits.page_size,
            kv_evictable_tokens=self.cache.evictable_pages * self.limits.page_size,
        )

    def check(self) -> None:
        """Verify every invariant; an AssertionError tells which is broken. O(pool): in tests."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """The same in portions of about a millisecond, for an idle worker. Drop it as soon as anything has changed."""
        waiting, running = list(self._admission.queue), list(self._lifecycle.running)
        leaving = list(self._lifecycle.leaving)
        yield from checks(self.holdings, waiting, running, leaving, list(self._launched))
        returning = [request for request in leaving if request.state is State.RETRACTED]
        open_uids = {request.uid for request in waiting + running + returning}
        assert self._lifecycle.requests.keys() == open_uids, "a request that has not ended is nowhere, or the reverse"
        stops = {token_id for request in running for token_id in request.submit.stop_token_ids}
        assert self._lifecycle.running.stop_tokens == stops, "the stop tokens of those that run are not theirs"
        assert self._lifecycle.running.rows.tolist() == [request.held.row for request in running]
        self._admission.check()

    def _learn_from(self, result: StepResult, launched: Launched) -> Advice | None:
        """Adapt the size of steps to what became of one. The advice, if its one request is to be given up."""
        num_tokens = len(launched.slots)
        if result.out_of_memory is not None:
            return self._recovery.ran_out(launched.pieces, num_tokens, result.out_of_memory)
        if result.error is None:
            self._recovery.passed(num_tokens, launched.num_sequences)
        return None

    def _plan_decodes(self, seated: RowIndex) -> Decodes:
        """The part of `seated` that decodes in this step, each with a slot for its next position."""
        rows, running = self.holdings.rows, self._lifecycle.running
        ready = seated[(rows.is_decoding[seated] > 0) & (rows.to_sample[seated] > 0)]
        needy = ready[rows.planned[ready] == rows.allocated[ready]]
        if len(needy) > self.holdings.available_pages:
            granted = self._scarcity.grant(running.at(ready), running.at(needy), may_settle=bool(self._launched))
            ready = np.array([request.held.row for request in granted], dtype=np.int64)
        elif len(needy):
            has_grown = self.holdings.grow(needy)
            assert has_grown, "pages that are available can be had"
        return Decodes(ready, running.at(ready), rows.planned[ready])

    def _launch(self, decodes: Decodes, chunks: list[Piece], admitted: list[Request]) -> StepPlan:
        self._num_planned += 1
        self._step_planned()
        restarted = [piece.request for piece in chunks if piece.request.restarts]
        starts = tuple(row_start(request, self.holdings.table) for request in [*restarted, *admitted])
        plan = assemble(self._num_planned, starts, decodes, chunks, self.holdings.table)
        if self._lifecycle.left_rows:
            plan = msgspec.structs.replace(plan, left_rows=tuple(self._lifecycle.left_rows))
            self._lifecycle.left_rows.clear()
        for request in restarted:
            request.restarts = 0
        self.holdings.rows.launched(plan)
        for chunk in chunks:
            if chunk.start + chunk.length == len(chunk.request.fill_ids):
                chunk.request.state = State.DECODE
        self._launched.append(Launched(plan.step, decodes, chunks, plan.slots))
        self.counters.launched(len(decodes.rows), plan.num_tokens - len(decodes.rows))
        return plan

    def _step_planned(self) -> None:
        """Time, as the forecast counts it, goes on."""
        share = self._admission.growth_share
        share.stepped()
        if not share.is_cautious:
            self.shortages.ended(Stage.KV_FULL)


def _children(submit: Submit) -> list[Submit]:
    """The further completions of a request, as requests of their own. Only the first is told of the prompt."""
    replace = msgspec.structs.replace
    return [
        replace(submit, uid=child.uid, seed=child.seed, children=(), prompt_logprobs=None) for child in submit.children
    ]

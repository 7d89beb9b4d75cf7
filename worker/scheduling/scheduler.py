"""The scheduler: decides what each step computes, and books what came of it. Pure: no torch, no I/O, time passed in.

    submit, abort, flush    what the front asks
    plan()                  the next step, as frozen data; it counts as launched from here on
    commit(result)          settles the oldest launched step; results come strictly in order
    drain()                 what to tell the front since it was last asked

    shortages               episodes in which memory ran short, with advice for the operator

Nothing else changes its state. One thread, the engine's.

Overlap needs no code of its own. Step N+1 may be planned before step N is committed: its decodes take their input
from the runner's relay, as they always do. A serial loop commits each step before it plans the next, by the same
code, and gets the same tokens.

A step is made in this order:
1. Every request in DECODE computes one token, unless its last token by length is in flight already. Where pages are
   short, cached prefixes are evicted, then the requests admitted last are retracted; as long as those have steps in
   flight, a request that finds no page skips a step.
2. Prompts that are begun go on, oldest first, by at most `Limits.prefill_budget` tokens together.
3. With what is left of the budget, requests are admitted from the queue (`Admission`).
4. With preemption: where the next in the queue found no row or no room, one running request of lower priority, the
   lowest and newest, is retracted once it has settled what it computes in this step. One at a time, and each comes back
   after the one that it left for, so nothing is retracted twice for the same request.

What a request holds is released in `_retire` alone, when none of its launched steps is unsettled: a step in flight
never sees its rows or pages in other hands. A token that arrives after its request has ended is counted, and dropped.

A step for which the device had no memory is taken back and tried again smaller: see `recovery`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

import msgspec

from radixfleet.clock import Clock
from radixfleet.types import FinishReason, Load
from worker.core.messages import Admitted, Ended, Output, PromptChunk, PromptLogprobs, StepOutputs, Submit
from worker.core.step import StepPlan, StepResult
from worker.memory.advisor import Advice, Bound, Shortage, Stage, advise
from worker.memory.page_allocator import PageAllocator, pages_for
from worker.memory.radix_cache import RadixCache
from worker.memory.req_to_token import ReqToTokenPool
from worker.scheduling.admission import Admission
from worker.scheduling.assembly import Launched, Piece, assemble, row_start
from worker.scheduling.counters import Counters
from worker.scheduling.holdings import Holdings
from worker.scheduling.invariants import checks
from worker.scheduling.leap import TokensAhead, leap, steps_ahead
from worker.scheduling.limits import Limits
from worker.scheduling.notes import Note, PromptRun, notes_of
from worker.scheduling.prefill import plan_chunks
from worker.scheduling.recovery import Recovery, take_back
from worker.scheduling.request import Request, State
from worker.scheduling.shortages import Shortages


class Scheduler:
    """See the head of the module."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        """Makes its own allocator, table and cache, empty, in the sizes that `limits` gives."""
        self.limits = limits
        self.counters = Counters()
        allocator = PageAllocator(limits.num_pages, limits.page_size)
        self.cache = RadixCache(allocator)
        row_length = pages_for(limits.max_context_tokens, limits.page_size) * limits.page_size
        self.holdings = Holdings(allocator, ReqToTokenPool(limits.max_running_requests, row_length), self.cache)
        self._clock = clock
        self._admission = Admission(limits, self.holdings)
        self._requests: dict[int, Request] = {}
        """Those that have not ended, by uid."""
        self._running: dict[int, Request] = {}
        """PREFILL and DECODE, in the order of admission, by uid."""
        self._leaving: set[Request] = set()
        """RETRACTED and FINISHED that still have steps in flight."""
        self._launched: deque[Launched] = deque()
        self._num_planned = 0
        self._num_submitted = 0
        self._left_rows: list[int] = []
        """Rows with edits whose requests have left them since the last plan."""
        self._outbox = StepOutputs([], [], [])
        self.shortages = Shortages()
        self._recovery = Recovery(limits, self.counters, self.shortages)

    def submit(self, submit: Submit) -> None:
        """Queue a request and its children, or refuse them at once when they can never fit. Their uids must be new."""
        refusal = self.limits.refusal(len(submit.token_ids), submit.max_new_tokens)
        parent = None
        for each in (submit, *_children(submit)):
            assert each.uid not in self._requests, f"uid {each.uid} is in use"
            if refusal is not None:
                self.counters.refused_requests += 1
                self._outbox.ended.append(Ended(each.uid, None, code="INVALID_ARGUMENT", message=refusal))
                continue
            self._num_submitted += 1
            request = Request(each, arrival=self._num_submitted, fill_ids=each.token_ids, parent=parent)
            parent = parent or request
            if each.prompt_logprobs is not None and len(each.token_ids) > 1:
                request.next_prompt_logprob = 1
            self._requests[each.uid] = request
            self._admission.enqueue(request)

    def abort(self, uid: int) -> None:
        """End a request in whatever state it is. An unknown uid, or one that has ended, is no error."""
        request = self._requests.get(uid)
        if request is None:
            return
        self.counters.aborted_requests += 1
        if request.outputs:
            # As a rule its front found a stop string.
            self._learn_growth(request)
        self._end(request, Ended(uid, FinishReason.ABORT))

    def flush(self) -> tuple[int, int]:
        """Drop all cached prefixes that no request uses: tokens dropped, tokens that requests keep.

        What a request uses stays valid and can be matched by others; so does what one that is leaving uses.
        """
        dropped = self.cache.flush()
        return dropped * self.limits.page_size, self.holdings.used_pages * self.limits.page_size

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can be computed before a launched step has settled, or at all."""
        seated = self._recovery.seated(self._running.values())
        decodes = self._plan_decodes(seated)
        resumed = [request for request in seated if request.restarts and request.resumes_decoding]
        begun = [request for request in seated if not request.resumes_decoding] if resumed else seated
        pieces = [Piece(request, request.planned, 1, samples=True) for request in [*decodes, *resumed]]
        size = self._recovery.size
        budget = min(self.limits.prefill_budget(len(pieces)), size.prompt_tokens.now)
        chunks = plan_chunks(begun, budget, self.limits.page_size)
        pieces += chunks
        budget -= sum(piece.length for piece in chunks)
        seats = size.sequences.now - len(pieces)
        admitted = self._admission.admit(self._running, budget, seats, step_is_empty=not chunks)
        for piece in admitted:
            self._running[piece.request.uid] = piece.request
            self._announce(piece.request)
        pieces += admitted
        plan = self._launch(pieces, len(decodes), [piece.request for piece in admitted]) if pieces else None
        if self.limits.preempt:
            self._preempt()
        return plan

    def commit(self, result: StepResult) -> None:
        """Settle the oldest launched step."""
        assert self._launched, f"step {result.step} has a result but was not launched"
        assert self._launched[0].step == result.step, f"step {result.step} settles before {self._launched[0].step}"
        launched = self._launched.popleft()
        pieces = launched.pieces
        ran_out = result.out_of_memory is not None
        given_up = self._learn_from(result, launched)
        token_ids = result.token_ids.tolist() if result.error is None else [0] * len(pieces)
        failed = result.failed.tolist() if result.error is None else [True] * len(pieces)
        for piece, token_id, has_failed, note in zip(pieces, token_ids, failed, notes_of(result, pieces), strict=True):
            request = piece.request
            request.in_flight -= 1
            request.samples_in_flight -= piece.samples
            if not ran_out:
                request.tries_alone = 0
            if request.stale_steps:
                request.stale_steps -= 1
            elif ran_out:
                take_back(request)
                if given_up is not None and request.state is not State.FINISHED:
                    self._give_up(request, given_up)
            elif has_failed:
                self._fail_step_of(request, note.cause, is_alone=result.error is None)
            else:
                if request.submit.traced:
                    self._tell_chunk(piece, result)
                self._settle(piece, token_id, note)
            if request in self._leaving and not request.in_flight:
                self._retire(request)

    def steps_ahead(self) -> int:
        """Steps that are sure to only decode, so that `leap` may do them at once; 0 while a step is in flight."""
        if self._launched or not self._recovery.size.is_full:
            return 0
        may_admit = len(self._admission.queue) > 0 and self.holdings.table.free_rows > 0
        return steps_ahead(self._running.values(), self.holdings, may_admit=may_admit)

    def leap(self, num_steps: int, tokens_ahead: TokensAhead) -> None:
        """Decode `num_steps` steps, at most `steps_ahead`, as planning and committing each would. For simulations.

        The front is told which requests end with the last step, but not the tokens: who leaps knows them.
        """
        assert not self._launched, "a leap begins between two steps"
        leap(self._running.values(), self.holdings, num_steps, tokens_ahead)
        self._num_planned += num_steps
        for _ in range(num_steps):
            self._step_planned()
        num_tokens = num_steps * len(self._running)
        self.counters.launched(len(self._running), 0, steps=num_steps)
        self.counters.generated_tokens += num_tokens
        for request in [each for each in self._running.values() if not each.is_growing]:
            self._finish(request, Ended(request.uid, FinishReason.LENGTH))

    @property
    def running_uids(self) -> Collection[int]:
        """Requests that hold memory and have not ended, in the order of admission."""
        return self._running.keys()

    @property
    def context_tokens(self) -> int:
        """Tokens that a step reads in which every running request decodes."""
        return sum(request.planned + 1 for request in self._running.values())

    def drain(self) -> StepOutputs | None:
        """All that the front has not been told yet, in order; None when there is nothing."""
        outbox = self._outbox
        if not (outbox.admitted or outbox.outputs or outbox.ended or outbox.prompt_logprobs or outbox.chunks):
            return None
        self._outbox = StepOutputs([], [], [])
        return outbox

    @property
    def step_limits(self) -> tuple[int, int]:
        """Prompt tokens in chunks, and sequences, that a step may have now."""
        return self._recovery.size.prompt_tokens.now, self._recovery.size.sequences.now

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not settled."""
        return len(self._launched)

    @property
    def has_work(self) -> bool:
        """Some request has not ended, or some launched step is not settled."""
        return bool(self._requests or self._launched)

    def load(self) -> Load:
        """What is being done and what waits; cached prefixes that nobody uses are no load."""
        queue = self._admission.queue
        waiting = sum(len(request.fill_ids) - request.expected_cached for request in queue)
        computing = sum(max(len(request.fill_ids) - request.settled, 0) for request in self._running.values())
        return Load(
            running_requests=len(self._running),
            waiting_requests=len(queue),
            outstanding_prompt_tokens=waiting + computing,
            kv_protected_tokens=self.holdings.used_pages * self.limits.page_size,
            kv_evictable_tokens=self.cache.evictable_pages * self.limits.page_size,
        )

    def check(self) -> None:
        """Verify every invariant; an AssertionError tells which is broken. O(pool): in tests."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """The same in portions of about a millisecond, for an idle worker. Drop it as soon as anything has changed."""
        waiting, running = list(self._admission.queue), list(self._running.values())
        yield from checks(self.holdings, waiting, running, list(self._leaving), list(self._launched))
        returning = [request for request in self._leaving if request.state is State.RETRACTED]
        open_uids = {request.uid for request in waiting + running + returning}
        assert self._requests.keys() == open_uids, "a request that has not ended is nowhere, or the reverse"

    def _learn_from(self, result: StepResult, launched: Launched) -> Advice | None:
        """Adapt the size of steps to what became of one. The advice, if its one request is to be given up."""
        pieces, num_tokens = launched.pieces, len(launched.slots)
        if result.out_of_memory is not None:
            return self._recovery.ran_out(pieces, num_tokens, result.out_of_memory)
        if result.error is None:
            self._recovery.passed(num_tokens, len(pieces))
        return None

    def _plan_decodes(self, seated: Collection[Request]) -> list[Request]:
        """Those of `seated` that decode in this step, each with a slot for its next position."""
        ready = [r for r in seated if r.state is State.DECODE and r.is_growing]
        needy = [request for request in ready if request.planned == request.held.allocated]
        if len(needy) > self.holdings.available_pages:
            return self._plan_scarce(ready, needy)
        granted = self.holdings.grow([request.held for request in needy])
        assert granted, "pages that are available can be had"
        return ready

    def _plan_scarce(self, ready: list[Request], needy: list[Request]) -> list[Request]:
        """The same where not each of `needy` can have the page that it needs: some leave, or skip the step."""
        needy = self._make_room(needy)
        num_granted = min(len(needy), self.holdings.available_pages)
        granted = self.holdings.grow([request.held for request in needy[:num_granted]])
        assert granted, "pages that are available can be had"
        stalled = needy[num_granted:]
        if stalled and not self._launched and not num_granted:
            # Alone, with nothing left to evict and nothing to wait for: it is never going to fit.
            self._fail_outgrown(stalled.pop())
        self.counters.stalled_decodes += len(stalled)
        skipped = set(stalled)
        return [r for r in ready if r.state is State.DECODE and r not in skipped]

    def _make_room(self, needy: list[Request]) -> list[Request]:
        """Retract, newest first, until each of `needy` has a page or one is being released for it; those still running.

        The oldest request is never retracted, so it gets on whatever happens, and so in turn does each.
        """
        growing = [request for request in self._running.values() if request.is_growing]
        if self.limits.preempt:
            growing.sort(key=lambda request: -request.submit.priority)
        ending = [request for request in self._running.values() if not request.is_growing]
        while len(growing) > 1 and len(needy) > self.holdings.available_pages + self._pages_released_by(ending):
            victim = growing.pop()
            self._admission.growth_share.retracted()
            used_tokens = (self.holdings.used_pages + len(needy)) * self.limits.page_size
            self.shortages.began(Stage.KV_FULL, advise(Stage.KV_FULL, Shortage(used_tokens, self.limits.kv_tokens)))
            self._retract(victim)
            needy = [request for request in needy if request is not victim]
        return needy

    def _preempt(self) -> None:
        """Retract one running request for the next in the queue, if that one is blocked and has a higher priority."""
        blocked = self._admission.blocked
        if blocked is None or blocked.waits_for is not None or any(r.state is State.RETRACTED for r in self._leaving):
            return
        lower = [r for r in self._running.values() if r.is_growing and r.submit.priority < blocked.submit.priority]
        kept = [r for r in self._running.values() if r.submit.priority >= blocked.submit.priority]
        if lower and self._admission.could_fit_beside(blocked, kept):
            self.counters.preemptions += 1
            self._retract(min(reversed(lower), key=lambda request: request.submit.priority))

    def _retract(self, victim: Request) -> None:
        self.counters.retractions += 1
        victim.state = State.RETRACTED
        self._leave(victim)

    def _pages_released_by(self, ending: list[Request]) -> int:
        """Pages that are released once what is in flight has settled, of `ending` and of requests that are leaving."""
        return sum(self.holdings.num_own_pages(request.held) for request in [*ending, *self._leaving])

    def _announce(self, request: Request) -> None:
        """Tell of a first admission. One that comes back after a retraction was told of already."""
        if request.was_admitted:
            return
        request.was_admitted = True
        cached_tokens = request.held.matched
        self.counters.admitted_requests += 1
        self.counters.prompt_tokens += len(request.fill_ids)
        self.counters.cached_tokens += cached_tokens
        self._outbox.admitted.append(Admitted(request.uid, cached_tokens, self._clock.now()))

    def _launch(self, pieces: list[Piece], num_decodes: int, admitted: list[Request]) -> StepPlan:
        self._num_planned += 1
        self._step_planned()
        restarted = [piece.request for piece in pieces if piece.request.restarts]
        starts = tuple(row_start(request, self.holdings.table) for request in [*restarted, *admitted])
        plan = assemble(self._num_planned, starts, pieces, num_decodes, self.holdings.table)
        if self._left_rows:
            plan = msgspec.structs.replace(plan, ends_rows=tuple(self._left_rows))
            self._left_rows.clear()
        for request in restarted:
            request.restarts = False
        for piece in pieces:
            request = piece.request
            request.planned += piece.length
            request.in_flight += 1
            request.samples_in_flight += piece.samples
            request.last_step = plan.step
            if request.planned >= len(request.fill_ids):
                request.state = State.DECODE
        self._launched.append(Launched(plan.step, pieces, plan.slots))
        self.counters.launched(num_decodes, plan.num_tokens - num_decodes)
        return plan

    def _step_planned(self) -> None:
        """Time, as the forecast counts it, goes on."""
        share = self._admission.growth_share
        share.stepped()
        if not share.is_cautious:
            self.shortages.ended(Stage.KV_FULL)

    def _settle(self, piece: Piece, token_id: int, note: Note) -> None:
        """The piece was computed: its KV is there, and its token, if its request still wants it."""
        request = piece.request
        request.settled = piece.start + piece.length
        if request.state is State.FINISHED:
            self.counters.discarded_tokens += piece.samples
            return
        if piece.start < len(request.fill_ids):
            self.holdings.keep(request.held, request.fill_ids[: request.settled])
        if note.prompt is not None:
            self._tell_prompt(request, note.prompt)
        if piece.samples:
            self._accept(request, token_id, note)

    def _tell_chunk(self, piece: Piece, result: StepResult) -> None:
        """A part of a traced prompt was computed."""
        uid, fill_tokens = piece.request.uid, len(piece.request.fill_ids)
        if piece.start < fill_tokens and piece.request.state is not State.FINISHED:
            chunk = PromptChunk(uid, piece.start, piece.length, result.started_s, result.ended_s)
            self._outbox.chunks.append(chunk)

    def _tell_prompt(self, request: Request, run: PromptRun) -> None:
        """Log probabilities of the prompt came. After a retraction, some may have been told already."""
        known, k = request.next_prompt_logprob - run.start, request.submit.prompt_logprobs or 0
        if not request.next_prompt_logprob or known >= len(run.logprobs):
            return
        top_ids, top_logprobs = run.top_ids[known:, :k].reshape(-1), run.top_logprobs[known:, :k].reshape(-1)
        told = PromptLogprobs(request.uid, request.next_prompt_logprob, run.logprobs[known:], top_ids, top_logprobs)
        self._outbox.prompt_logprobs.append(told)
        request.next_prompt_logprob = run.start + len(run.logprobs)
        if request.next_prompt_logprob == len(request.submit.token_ids):
            request.next_prompt_logprob = 0

    def _accept(self, request: Request, token_id: int, note: Note) -> None:
        """One token more, and what it means for its request. A stop token at the length limit is a stop."""
        submit = request.submit
        may_stop = len(request.outputs) >= submit.min_new_tokens
        request.outputs.append(token_id)
        self.counters.generated_tokens += 1
        self._outbox.outputs.append(Output(request.uid, token_id, note.sampled))
        if may_stop and token_id in submit.stop_token_ids:
            self._finish(request, Ended(request.uid, FinishReason.STOP, matched_token_id=token_id))
        elif note.has_ended:
            self._finish(request, Ended(request.uid, FinishReason.STOP))
        elif len(request.outputs) >= submit.max_new_tokens:
            self._finish(request, Ended(request.uid, FinishReason.LENGTH))

    def _finish(self, request: Request, ended: Ended) -> None:
        self.counters.finished_requests += 1
        self._learn_growth(request)
        self._end(request, ended)

    def _learn_growth(self, request: Request) -> None:
        self._admission.growth_share.ended(len(request.outputs) / request.submit.max_new_tokens)

    def _fail_step_of(self, request: Request, cause: str, *, is_alone: bool) -> None:
        """A step of the request failed, for its row alone or for all in it: nothing more of it is cached."""
        request.is_poisoned = True
        if request.state is not State.FINISHED:
            alone = cause or "the model gave it no valid probabilities (NaN)"
            why = alone if is_alone else "the device could not compute its step"
            self._fail(request, "INTERNAL", f"{why}; other requests go on, and this one may be sent again")

    def _fail_outgrown(self, request: Request) -> None:
        shortage = Shortage(request.planned + 1, self.limits.kv_tokens, Bound.ONE_REQUEST)
        self._fail(request, "RESOURCE_EXHAUSTED", advise(Stage.KV_FULL, shortage).text)

    def _give_up(self, request: Request, advice: Advice) -> None:
        self._fail(request, "RESOURCE_EXHAUSTED", f"the request does not run even alone, token by token. {advice.text}")

    def _fail(self, request: Request, code: str, message: str) -> None:
        self.counters.failed_requests += 1
        self._end(request, Ended(request.uid, None, code=code, message=message))

    def _end(self, request: Request, ended: Ended) -> None:
        """The one terminal outcome of a request, whatever its state."""
        del self._requests[request.uid]
        if not self._requests:
            self.shortages.ended(Stage.KV_FULL)
        self._outbox.ended.append(ended)
        before, request.state = request.state, State.FINISHED
        if before is State.WAITING:
            self._admission.queue.remove(request)
        elif before is not State.RETRACTED:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Plan it no more; it retires now, or when its launched steps have settled."""
        del self._running[request.uid]
        self._leaving.add(request)
        if not request.in_flight:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Release all that a request holds: the one place. No launched step reads or writes any of it any more.

        Its computed KV goes to the cache, that of generated tokens included. (The KV of the last token was not
        computed, and that of a token which was dropped is not kept.)
        """
        assert not request.in_flight
        assert not request.samples_in_flight
        if not request.is_poisoned:
            self.holdings.keep(request.held, request.history()[: request.settled])
        if request.submit.edits is not None:
            self._left_rows.append(request.held.row)
        self.holdings.release(request.held)
        request.holding = None
        self._leaving.remove(request)
        if request.state is State.RETRACTED:
            request.state = State.WAITING
            request.fill_ids = request.history()
            request.planned = request.settled = 0
            request.restarts = False
            self._admission.enqueue(request)


def _children(submit: Submit) -> list[Submit]:
    """The further completions of a request, as requests of their own. Only the first is told of the prompt."""
    replace = msgspec.structs.replace
    return [
        replace(submit, uid=child.uid, seed=child.seed, children=(), prompt_logprobs=None) for child in submit.children
    ]

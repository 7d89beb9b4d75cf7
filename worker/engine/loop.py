"""The engine's loop: ingest -> plan -> launch -> settle, turn after turn, on the one thread that owns the scheduler.

    ingest   apply what the front says: submit, abort, flush, stop
    plan     ask the scheduler for a step, if one more may be in flight
    launch   hand it to the executor
    settle   commit the results that have come; tell the front all that this turn brought, in one message

Overlapped and serial are the same acts. Overlapped, two steps may be in flight: step N+1 is planned and launched while
N runs, and the device never waits for the scheduler. Serial, one. Between two turns the caller waits for a message or a
result, at most for `wait_s`: until a step is to be planned, or the next report is due.

The loop knows nothing of processes: messages, results and time come through what it is given.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import structlog

from radixfleet.clock import Clock
from worker.core.messages import (
    Abort,
    BlockRun,
    EngineMessage,
    Flush,
    Flushed,
    FollowBlocks,
    FrontMessage,
    Prepare,
    Report,
    Stop,
    Submit,
)
from worker.core.step import StepPlan
from worker.engine.counters import LoopCounters, StepTimes
from worker.engine.executors import Executor
from worker.engine.pacing import Pacing
from worker.scheduling.scheduler import Scheduler

log = structlog.get_logger(__name__)

REPORT_CHANGED_S = 0.05
REPORT_ALIVE_S = 0.5
CHECK_EVERY_S = 60.0
"""Least time between two checks of all invariants, which an idle engine makes in portions of about a millisecond."""


class Mailbox(Protocol):
    """The engine's side of the conversation with its front."""

    def receive(self) -> list[FrontMessage]:
        """What has come since the last call, in order. Never waits."""
        ...

    def send(self, message: EngineMessage) -> None:
        """Tell the front. Never waits."""
        ...


class EngineLoop:
    """Drives one scheduler. `turn` is called from one thread only, until `finished`."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        mailbox: Mailbox,
        clock: Clock,
        *,
        overlap: bool,
        pacing: Pacing | None = None,
    ) -> None:
        """`pacing`: says how long planning may wait while a step is in flight; None: it never does."""
        self._scheduler = scheduler
        self._executor = executor
        self._mailbox = mailbox
        self._clock = clock
        self._max_in_flight = 2 if overlap else 1
        self._pacing = pacing if overlap else None
        self._launched_s: deque[float] = deque()
        """When each step in flight was launched."""
        self._is_held_back = False
        """A step could be in flight besides, but its planning waits until it is due."""
        self._plan_at_s = math.inf
        """When to try to plan again, if nothing happens before."""
        self._last_result_s = clock.now()
        self._stopping = False
        self._counters = LoopCounters()
        self._times = StepTimes(self._counters)
        self._reported_s = clock.now()
        self._changed = True
        """Something happened since the last report."""
        self._all_blocks_wanted = False
        """The next report has the tokens of all cached blocks."""
        self._checked_s = clock.now()
        self._unchecked = False
        """Something happened since the last check."""
        self._checks: Iterator[None] | None = None
        """The check that is under way."""

    @property
    def finished(self) -> bool:
        """Told to stop, and nothing is in flight."""
        return self._stopping and not self._launched_s

    @property
    def wait_s(self) -> float:
        """How long to wait for a message or a result before the next turn, for a report or a plan to be on time."""
        if self.finished or self._checks is not None:
            return 0.0
        return max(0.0, min(self._plan_at_s, self._report_due_s) - self._clock.now())

    @property
    def _report_due_s(self) -> float:
        return self._reported_s + (REPORT_CHANGED_S if self._changed else REPORT_ALIVE_S)

    def turn(self) -> bool:
        """The four acts, then a report if one is due. False when there was nothing to do but that."""
        began_s = self._clock.now()
        heard = self._ingest()
        plan = self._plan()
        self._counters.scheduling_s += self._clock.now() - began_s
        if plan is not None:
            self._launch(plan)
        settled = self._settle()
        busy = heard or settled or plan is not None
        if busy:
            self._plan_at_s = self._plan_due_s
        self._changed |= busy
        self._unchecked |= busy
        self._check(busy=busy)
        if self._clock.now() >= self._report_due_s:
            self._report()
        return busy

    def _ingest(self) -> bool:
        """Apply what the front says. True when it said anything."""
        messages = self._mailbox.receive()
        had_work = self._scheduler.has_work
        for message in messages:
            match message:
                case Submit():
                    self._scheduler.submit(message)
                case Abort(uid=uid):
                    self._scheduler.abort(uid)
                case Flush(ticket=ticket):
                    flushed_tokens, kept_tokens = self._scheduler.flush()
                    self._mailbox.send(Flushed(ticket, flushed_tokens, kept_tokens))
                case FollowBlocks(on=on):
                    self._scheduler.cache.block_events.follow(on=on)
                    self._all_blocks_wanted = on
                case Prepare():
                    self._executor.prepare(message)
                case Stop():
                    self._stopping = True
        if self._scheduler.has_work and not had_work:
            self._times.work_came(self._clock.now())
        return bool(messages)

    def _plan(self) -> StepPlan | None:
        """A step, if one more may be in flight, it is time for it, and there is one to make."""
        if self._clock.now() < self._plan_due_s:
            self._is_held_back = len(self._launched_s) < self._max_in_flight
            return None
        plan = self._scheduler.plan()
        self._is_held_back &= plan is not None
        self._plan_at_s = math.inf
        return plan

    @property
    def _plan_due_s(self) -> float:
        """When to plan the next step; never, before something has happened, when no more may be in flight."""
        if self._stopping or len(self._launched_s) >= self._max_in_flight:
            return math.inf
        return self._pacing.due_s if self._pacing is not None and self._launched_s else -math.inf

    def _launch(self, plan: StepPlan) -> None:
        """Hand a step to the executor."""
        now_s = self._clock.now()
        self._launched_s.append(now_s)
        self._executor.launch(plan)
        if self._pacing is not None:
            self._pacing.launched(plan.num_tokens, now_s, was_due=self._is_held_back)
        self._is_held_back = False

    def _settle(self) -> bool:
        """Commit the results that have come, and tell the front what the turn brought. True when a runner spoke."""
        results = self._executor.results()
        began_s = self._clock.now()
        for result in results:
            self._scheduler.commit(result)
            self._is_held_back = False
            self._times.ended(result)
            if self._pacing is not None:
                self._pacing.ended(result)
            self._launched_s.popleft()
            self._last_result_s = began_s
            if result.error is not None and result.out_of_memory is None:
                log.error("a step failed as a whole", step=result.step, error=result.error)
        layers_computed = self._executor.take_layers_computed()
        if layers_computed and self._pacing is not None:
            self._pacing.layers_computed()
        for prepared in self._executor.prepared():
            self._mailbox.send(prepared)
        outputs = self._scheduler.drain()
        if outputs is not None:
            self._mailbox.send(outputs)
        self._counters.scheduling_s += self._clock.now() - began_s
        return bool(results) or layers_computed

    def _check(self, *, busy: bool) -> None:
        """Verify the books of an idle engine that has worked, now and then, one portion a turn; work comes first."""
        if busy:
            self._checks = None
            return
        now_s = self._clock.now()
        if self._checks is None:
            if not self._unchecked or self._scheduler.has_work or now_s - self._checked_s < CHECK_EVERY_S:
                return
            self._checked_s = now_s
            self._checks = self._scheduler.checks()
        if next(self._checks, True):
            self._checks = None
            self._unchecked = False

    def _report(self) -> None:
        """Send the state of the engine."""
        now_s = self._clock.now()
        self._tell_shortages()
        evicted, added = self._scheduler.cache.block_events.drain()
        step_s, bubble_s = self._times.take()
        self._reported_s = now_s
        self._changed = False
        self._mailbox.send(
            Report(
                load=self._scheduler.load(),
                evicted_blocks=evicted,
                added_blocks=added,
                counters=self._scheduler.counters.as_dict() | self._counters.as_dict(),
                step_age_s=now_s - max(self._launched_s[0], self._last_result_s) if self._launched_s else 0.0,
                step_s=step_s,
                bubble_s=bubble_s,
                step_limits=self._scheduler.step_limits,
                advice=self._scheduler.shortages.open,
                block_runs=self._block_runs(),
                has_all_blocks=self._all_blocks_wanted,
            )
        )
        self._all_blocks_wanted = False

    def _block_runs(self) -> list[BlockRun] | None:
        """What `Report.block_runs` says. Asked in the turn in which changes are drained, so that none is missed."""
        cache = self._scheduler.cache
        runs = cache.block_events.drain_runs()
        return cache.block_runs() if self._all_blocks_wanted else runs

    def _tell_shortages(self) -> None:
        """One line when memory runs short, and one when there is enough again: not one for each step."""
        for change in self._scheduler.shortages.take_changes():
            prompt_tokens, sequences = self._scheduler.step_limits
            limits = {"step_prompt_tokens": prompt_tokens, "step_sequences": sequences}
            if change.began:
                log.warning("memory ran short", stage=change.stage.value, advice=change.advice.text, **limits)
            else:
                log.info("memory is enough again", stage=change.stage.value, **limits)

"""Many decode steps at once: a scheduler that leaps is, step for step, where one that plans and commits is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from radixfleet.clock import ManualClock
from tests.support.sim_worker import make_submit
from worker.core.messages import StepOutputs, Submit
from worker.core.step import StepPlan, StepResult
from worker.scheduling.limits import Limits
from worker.scheduling.request import Request
from worker.scheduling.scheduler import Scheduler

SMALL = Limits(
    num_pages=49, page_size=4, max_running_requests=4, chunked_prefill_size=16, max_context_tokens=128, order="lpm"
)


def token(uid: int, index: int) -> int:
    """The token that request `uid` generates as its number `index`."""
    return (uid * 31 + index * 7) % 1000


def tokens_ahead(request: Request, count: int) -> list[int]:
    made = len(request.outputs)
    return [token(request.uid, made + index) for index in range(count)]


@dataclass
class Driven:
    """A scheduler, and what became of its requests."""

    limits: Limits = SMALL
    leaps: bool = False
    steps: int = 0
    leapt: int = 0
    ended: dict[int, int] = field(default_factory=dict)
    """uid -> number of the step with which it ended."""
    admitted: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, uid, cached tokens)."""
    generated: dict[int, int] = field(default_factory=dict)
    slots: dict[int, bytes] = field(default_factory=dict)
    """Of the steps that were really planned."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, ManualClock())
        # As if most requests had ended early: too many are admitted, and some are retracted.
        for _ in range(50):
            self.scheduler._admission.growth_share.ended(0.1)

    def advance(self, until_step: int) -> None:
        """Do steps up to and including number `until_step`, or until there is nothing to do."""
        while self.steps < until_step and self.scheduler.has_work:
            ahead = min(self.scheduler.steps_ahead(), until_step - self.steps) if self.leaps else 0
            if ahead:
                self.scheduler.leap(ahead, tokens_ahead)
                self.steps += ahead
                self.leapt += ahead
                self._hear()
            else:
                self._step()

    def _step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        self.steps += 1
        assert plan.step == self.steps
        self.slots[plan.step] = plan.slots.tobytes()
        self.scheduler.commit(self._result(plan))
        self._hear()

    def _hear(self) -> None:
        told = self.scheduler.drain() or StepOutputs([], [], [])
        self.admitted += [(self.steps, said.uid, said.cached_tokens) for said in told.admitted]
        self.ended |= {said.uid: self.steps for said in told.ended}

    def _result(self, plan: StepPlan) -> StepResult:
        by_row = {request.held.row: request for request in self.scheduler._lifecycle.running}
        ids = [token(by_row[row].uid, len(by_row[row].outputs)) for row in plan.rows.tolist()]
        failed = np.zeros(len(ids), dtype=np.bool_)
        return StepResult(plan.step, np.array(ids, dtype=np.int32), failed, 0.0, 0.0)

    def state(self) -> object:
        """All that the scheduler holds."""
        scheduler = self.scheduler
        holdings = scheduler.holdings
        return (
            [
                (
                    request.uid,
                    request.state,
                    request.planned,
                    request.settled,
                    request.outputs,
                    request.held.allocated,
                    holdings.table.slots(request.held.row, 0, request.held.allocated).tolist(),
                )
                for request in scheduler._lifecycle.running
            ],
            [waiting.uid for waiting in scheduler._admission.queue],
            holdings.allocator._stack[: holdings.allocator.free_pages].tolist(),
            scheduler.cache.block_hashes().tolist(),
            [(node.start, node.end, node.pages.tolist()) for node in scheduler.cache._locks.order],
            scheduler.counters.as_dict(),
            scheduler._admission.growth_share.value,
            scheduler.load(),
        )


def traffic(seed: int, count: int = 40) -> Iterator[tuple[int, Submit]]:
    """(number of the step before which it comes, request): shared prefixes, more than the pool holds."""
    random = np.random.default_rng(seed)
    prefixes = random.integers(0, 1000, (4, 24))
    step = 0
    for uid in range(count):
        step += int(random.integers(0, 12))
        prompt = np.concatenate([prefixes[random.integers(4)], random.integers(0, 1000, random.integers(1, 30))])
        yield step, make_submit(uid, prompt, int(random.integers(1, 60)))


@pytest.mark.parametrize("seed", range(8))
def test_a_leap_ends_where_as_many_steps_do(seed: int) -> None:
    """Under evictions, retractions and a full batch, compared before each arrival and at the end."""
    stepping, leaping = Driven(), Driven(leaps=True)
    for at_step, submit in traffic(seed):
        for driven in (stepping, leaping):
            driven.advance(at_step)
            driven.scheduler.submit(submit)
        assert leaping.state() == stepping.state()
        leaping.scheduler.check()
    for driven in (stepping, leaping):
        driven.advance(100_000)
    assert leaping.state() == stepping.state()
    assert (leaping.ended, leaping.admitted) == (stepping.ended, stepping.admitted)
    assert leaping.slots.items() <= stepping.slots.items()
    assert 0 < leaping.leapt < leaping.steps == stepping.steps
    assert len(leaping.ended) == 40


def test_the_traffic_makes_the_pool_run_short() -> None:
    """Else the test above would say little."""
    driven = Driven()
    for at_step, submit in traffic(0):
        driven.advance(at_step)
        driven.scheduler.submit(submit)
    driven.advance(100_000)
    assert driven.scheduler.counters.retractions > 0
    assert driven.scheduler.counters.cached_tokens > 0


class TestStepsAhead:
    def test_stops_where_the_first_request_ends(self) -> None:
        driven = Driven()
        driven.scheduler.submit(make_submit(0, range(5), 10))
        driven.scheduler.submit(make_submit(1, range(100, 105), 4))
        driven.advance(1)
        assert driven.scheduler.steps_ahead() == 3

    def test_is_none_while_prompts_are_computed_or_nothing_runs(self) -> None:
        driven = Driven()
        assert driven.scheduler.steps_ahead() == 0
        driven.scheduler.submit(make_submit(0, range(40), 10))
        driven.advance(1)
        assert driven.scheduler.steps_ahead() == 0

    def test_is_none_while_a_request_could_be_admitted(self) -> None:
        driven = Driven()
        driven.scheduler.submit(make_submit(0, range(5), 50))
        driven.advance(1)
        assert driven.scheduler.steps_ahead() == 49
        driven.scheduler.submit(make_submit(1, range(5), 50))
        assert driven.scheduler.steps_ahead() == 0

    def test_does_not_mind_a_queue_behind_a_full_batch(self) -> None:
        driven = Driven()
        for uid in range(5):
            driven.scheduler.submit(make_submit(uid, range(uid, uid + 4), 20))
        driven.advance(1)
        assert (len(driven.scheduler.running_uids), driven.scheduler.load().waiting_requests) == (4, 1)
        assert driven.scheduler.steps_ahead() == 19

    def test_stops_where_pages_run_short(self) -> None:
        driven = Driven(
            Limits(num_pages=11, page_size=4, max_running_requests=4, chunked_prefill_size=16, max_context_tokens=40)
        )
        for uid in range(2):
            driven.scheduler.submit(make_submit(uid, range(uid * 10, uid * 10 + 8), 25))
        driven.advance(1)
        assert len(driven.scheduler.running_uids) == 2
        # Six pages are left: two requests that end a page now can both go on for 12 tokens, and no leap goes beyond.
        assert 0 < driven.scheduler.steps_ahead() <= 12

    def test_is_none_where_a_token_may_end_a_request(self) -> None:
        driven = Driven()
        driven.scheduler.submit(make_submit(0, range(5), 50, stop_token_ids=(1001,)))
        driven.advance(1)
        assert driven.scheduler.steps_ahead() == 0

    def test_is_none_while_a_step_is_in_flight(self) -> None:
        driven = Driven()
        driven.scheduler.submit(make_submit(0, range(5), 50))
        driven.advance(3)
        assert driven.scheduler.plan() is not None
        assert driven.scheduler.steps_ahead() == 0
        with pytest.raises(AssertionError, match="between two steps"):
            driven.scheduler.leap(1, tokens_ahead)

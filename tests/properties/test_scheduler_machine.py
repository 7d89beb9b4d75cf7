"""The scheduler under any legal order of what its loop can do, with 0 to 2 steps in flight and tiny pools.

Prompts come from a tiny alphabet and share prefixes, so that they meet in the cache, in retractions and in waiting.
After each act all invariants are checked and the runner verifies every slot; at the end every request has exactly one
outcome, no page is lost, and the tokens of each are those of a run that nothing interrupted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from radixfleet.types import FinishReason
from tests.support.memory_faults import shortage
from tests.support.sim_worker import SimWorker, make_submit
from worker.core.messages import Child, Submit

_VOCAB = 6
_SHARED = np.array([1, 2, 3, 4, 5, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] * 3, dtype=np.int32)


class SchedulerMachine(RuleBasedStateMachine):
    """One worker; requests come, are aborted and fail while steps are launched and settled."""

    def __init__(self) -> None:
        super().__init__()
        self.worker: SimWorker | None = None
        self.next_uid = 0

    @initialize(
        page_size=st.sampled_from([1, 2, 16]),
        num_pages=st.integers(3, 12),
        max_running=st.integers(1, 4),
        chunk=st.sampled_from([1, 3, 4, 16, 64]),
        order=st.sampled_from(["fcfs", "lpm", "priority"]),
        preempt=st.booleans(),
        step_cost_tokens=st.sampled_from([0, 1, 4]),
        learned=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_running: int,
        chunk: int,
        order: str,
        preempt: bool,
        step_cost_tokens: int,
        learned: bool,
    ) -> None:
        self.worker = SimWorker(
            num_pages=num_pages * (1 if page_size == 16 else 16 // page_size // 2),
            page_size=page_size,
            max_running=max_running,
            chunk=chunk,
            vocab_size=_VOCAB,
            order=order,
            preempt=preempt and order == "priority",
            max_overtakes=2,
            shared_prefix_tokens=2,
            step_cost_tokens=step_cost_tokens,
        )
        if learned:
            # As if many requests had ended early: admission counts on almost no growth, and is often wrong.
            for _ in range(60):
                self.worker.scheduler._admission.growth_share.ended(0.0)

    @rule(
        shared=st.integers(0, len(_SHARED)),
        tail=st.lists(st.integers(0, _VOCAB - 1), max_size=8),
        max_new_tokens=st.integers(1, 24),
        min_new_tokens=st.integers(0, 3),
        stop=st.sampled_from([(), (0,), (0, 1), (1, 4)]),
        namespace=st.sampled_from([("m", ""), ("m", "salt")]),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.integers(0, 2),
        logprobs=st.sampled_from([None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        num_children=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def submit(self, shared: int, tail: list[int], max_new_tokens: int, **parameters: object) -> None:
        prompt = np.concatenate([_SHARED[:shared], np.asarray(tail, dtype=np.int32)])
        self.next_uid += 1
        num_children = int(parameters.pop("num_children"))
        if not len(prompt):
            parameters["prompt_logprobs"] = None
        uid = self.next_uid
        children = tuple(Child(uid + number, seed=uid + number) for number in range(1, num_children + 1))
        self.next_uid += num_children
        submit: Submit = make_submit(uid, prompt, max_new_tokens, children=children, **self._named(uid, parameters))
        self.worker.submit(submit)

    def _named(self, uid: int, parameters: dict[str, object]) -> dict[str, object]:
        return {"stop_token_ids": parameters.pop("stop"), "seed": uid, **parameters}

    @precondition(lambda self: len(self.worker.launched) < 2)
    @rule()
    def launch(self) -> None:
        self.worker.launch()

    @precondition(lambda self: self.worker.launched)
    @rule()
    def settle(self) -> None:
        self.worker.settle()

    @rule(turns=st.integers(1, 8), in_flight=st.integers(1, 2))
    def turn(self, turns: int, in_flight: int) -> None:
        for _ in range(turns):
            self.worker.step(in_flight=in_flight)

    @precondition(lambda self: self.next_uid)
    @rule(back=st.integers(0, 5))
    def abort(self, back: int) -> None:
        self.worker.abort(max(1, self.next_uid - back))

    @rule()
    def flush(self) -> None:
        before = self.worker.scheduler.cache.protected_pages
        self.worker.flush()
        assert self.worker.scheduler.cache.evictable_pages == 0
        assert self.worker.scheduler.cache.protected_pages == before

    @precondition(lambda self: self.worker.launched)
    @rule(in_sampling=st.booleans(), data=st.data())
    def run_out_of_memory(self, in_sampling: bool, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from([plan.step for plan in self.worker.launched]))
        earlier = self.worker.runner.faults.out_of_memory
        self.worker.runner.faults.out_of_memory = lambda plan: (
            shortage(in_sampling=in_sampling) if plan.step == step else earlier(plan)
        )

    @precondition(lambda self: self.worker.launched)
    @rule(whole=st.booleans(), data=st.data())
    def fail(self, whole: bool, data: st.DataObject) -> None:
        plan = data.draw(st.sampled_from(list(self.worker.launched)))
        if whole:
            self.worker.runner.faults.step_errors[plan.step] = "injected"
        else:
            index = data.draw(st.integers(0, plan.num_sequences - 1))
            self.worker.runner.faults.nan_sequences[plan.step] = {index}

    def teardown(self) -> None:
        if self.worker is None:
            return
        self.worker.run(in_flight=2)
        self.worker.assert_idle()
        for uid, told in self.worker.told.items():
            self.worker.assert_tokens(uid)
            assert told.ended.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, None)
            if told.ended.reason is None:
                assert told.ended.code in ("INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
                assert told.ended.message
                assert "too small for one request" not in told.ended.message, "it was not refused"
        counters = self.worker.scheduler.counters
        ended = counters.finished_requests + counters.aborted_requests + counters.failed_requests
        assert ended + counters.refused_requests == len(self.worker.told)
        assert counters.generated_tokens == sum(len(told.tokens) for told in self.worker.told.values())


SchedulerMachine.TestCase.settings = settings(
    max_examples=35, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 4, 16]),
    prompt_tokens=st.integers(1, 40),
    max_new_tokens=st.integers(1, 20),
    spare_pages=st.integers(0, 4),
    num_children=st.integers(1, 4),
    strangers=st.lists(st.sampled_from([None, 1]), max_size=2),
    max_running=st.integers(1, 6),
    chunk=st.sampled_from([1, 3, 16, 64]),
    order=st.sampled_from(["fcfs", "lpm", "priority"]),
    in_flight=st.integers(1, 2),
    shared_prefix_tokens=st.sampled_from([2, 64]),
    learned=st.booleans(),
)
def test_completions_each_of_which_fits_alone_all_come_to_their_length(
    page_size: int,
    prompt_tokens: int,
    max_new_tokens: int,
    spare_pages: int,
    num_children: int,
    strangers: list[int | None],
    learned: bool,
    in_flight: int,
    **sizes: Any,
) -> None:
    """In a pool for one of them, or hardly more, beside others with the same prompt, some told of its tokens.

    What each holds twice for a while, its own copy and the cache's, never keeps it from its end.
    """
    num_pages = -(-(prompt_tokens + max_new_tokens) // page_size) + spare_pages
    worker = SimWorker(num_pages=num_pages, page_size=page_size, vocab_size=_VOCAB, **sizes)
    if learned:
        for _ in range(60):
            worker.scheduler._admission.growth_share.ended(0.0)
    prompt = _SHARED[:prompt_tokens]
    children = tuple(Child(uid, seed=uid) for uid in range(2, num_children + 2))
    worker.submit(make_submit(1, prompt, max_new_tokens, temperature=1.0, seed=1, children=children))
    for uid, prompt_logprobs in enumerate(strangers, num_children + 2):
        worker.submit(make_submit(uid, prompt, max_new_tokens, prompt_logprobs=prompt_logprobs))
    worker.run(in_flight=in_flight)
    worker.assert_idle()
    for uid, told in worker.told.items():
        assert told.ended.reason is FinishReason.LENGTH, told.ended.message
        worker.assert_tokens(uid)


_LONG_STEPS = 1_700
"""Of each of six runs: more than 10,000 steps together, with all books checked after every one of them."""


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("page_size", "order"), [(1, "lpm"), (2, "fcfs"), (16, "priority")])
def test_a_long_run_loses_nothing(page_size: int, order: str, in_flight: int) -> None:
    """Behaviours 8, 10: a long run of requests, aborts, failures and retractions in a pool that is too small.

    The books, conservation of pages among them, are checked after each step.
    """
    random = np.random.default_rng(page_size * 10 + in_flight)
    worker = SimWorker(
        num_pages=128 // page_size + 2,
        page_size=page_size,
        max_running=6,
        chunk=24,
        vocab_size=_VOCAB,
        order=order,
        preempt=order == "priority",
        shared_prefix_tokens=16,
        step_cost_tokens=4 * (in_flight - 1),
        check_each_act=False,
    )
    turn = 0
    while len(worker.plans) < _LONG_STEPS:
        turn += 1
        if random.random() < 0.15:
            own = random.integers(0, _VOCAB, random.integers(1, 6))
            submit = make_submit(
                turn,
                np.concatenate([_SHARED[: random.integers(0, 49)], own]),
                int(random.integers(1, 60)),
                stop_token_ids=((), (0,))[int(random.random() < 0.5)],
                namespace=("m", str(random.integers(0, 2))),
                priority=int(random.integers(0, 3)),
            )
            worker.submit(submit)
        if random.random() < 0.02 and worker.told:
            worker.abort(int(random.choice(list(worker.told)[-8:])))
        if random.random() < 0.01:
            worker.runner.faults.step_errors[len(worker.plans) + 1] = "injected"
        worker.step(in_flight=in_flight)
        worker.scheduler.check()
    worker.run(in_flight=in_flight)
    worker.assert_idle()
    for uid in worker.told:
        worker.assert_tokens(uid)
    assert worker.scheduler.counters.finished_requests > 100
    assert worker.scheduler.counters.failed_requests > 0
    assert worker.scheduler.counters.retractions > 0

"""The simulated runner: its tokens, the promises that it verifies, its time and its failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from radixfleet.clock import ManualClock, MonotonicClock
from tests.support.sim_worker import SimWorker, make_submit, reference
from worker.core.step import RowStart, StepPlan
from worker.runner.sim import CostModel, SimRunner, SimRunnerConfig
from worker.runner.sim_model import PlanError

CONFIG = SimRunnerConfig(
    vocab_size=50,
    kv_tokens=64,
    page_size=4,
    max_running_requests=4,
    chunked_prefill_size=32,
    max_context_tokens=64,
    cost=None,
    verify=True,
)


@dataclass
class Sequence:
    row: int
    start: int
    input_ids: list[int]
    slots: list[int]
    samples: bool = True
    relayed: bool = False


@dataclass
class Steps:
    """Numbers plans, as the scheduler would."""

    runner: SimRunner
    step: int = 0
    starts: list[RowStart] = field(default_factory=list)

    def begin(self, row: int, prefix_slots: list[int] | None = None, **named: object) -> None:
        self.starts.append(make_start(row, prefix_slots or [], **named))

    def run(self, *sequences: Sequence) -> list[int]:
        self.step += 1
        starts, self.starts = tuple(self.starts), []
        plan = StepPlan(
            step=self.step,
            row_starts=starts,
            rows=np.array([s.row for s in sequences], dtype=np.int32),
            starts=np.array([s.start for s in sequences], dtype=np.int32),
            lengths=np.array([len(s.input_ids) for s in sequences], dtype=np.int32),
            samples=np.array([s.samples for s in sequences]),
            relayed=np.array([s.relayed for s in sequences]),
            input_ids=np.array([token for s in sequences for token in s.input_ids], dtype=np.int32),
            slots=np.array([slot for s in sequences for slot in s.slots], dtype=np.int32),
        )
        return self.runner.run(plan).token_ids.tolist()


def make_start(row: int, prefix_slots: list[int], **named: object) -> RowStart:
    values = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 0,
        "prompt_tokens": 4,
        "min_new_tokens": 0,
        "stop_token_ids": (),
    } | named
    return RowStart(row=row, prefix_slots=np.array(prefix_slots, dtype=np.int32), **values)


@pytest.fixture
def steps() -> Steps:
    """A runner in which row 0 has computed four tokens in slots 4..7."""
    steps = Steps(SimRunner(CONFIG, ManualClock()))
    steps.begin(0)
    steps.run(Sequence(0, 0, [1, 2, 3, 4], [4, 5, 6, 7]))
    return steps


def test_tokens_follow_the_reference(steps: Steps) -> None:
    expected, _ = reference(make_submit(1, [9, 8, 7], 3), 50)
    steps.begin(1)
    got = steps.run(Sequence(1, 0, [9, 8, 7], [8, 9, 10]))
    got += steps.run(Sequence(1, 3, [0], [11], relayed=True))
    got += steps.run(Sequence(1, 4, [0], [12], relayed=True))
    assert got == expected


def test_a_prefix_and_chunks_give_the_same_token(steps: Steps) -> None:
    whole, _ = reference(make_submit(1, [1, 2, 3, 4, 5, 6], 1), 50)
    steps.begin(1, [4, 5, 6, 7])
    assert steps.run(Sequence(1, 4, [5, 6], [8, 9])) == whole
    steps.begin(2)
    steps.run(Sequence(2, 0, [1, 2, 3], [12, 13, 14], samples=False))
    assert steps.run(Sequence(2, 3, [4, 5, 6], [15, 16, 17])) == whole


def test_sampling_depends_on_seed_and_position_alone() -> None:
    def tokens(seed: int) -> list[int]:
        worker = SimWorker(vocab_size=1_000)
        worker.submit(make_submit(1, [1, 2, 3], 8, temperature=1.0, seed=seed))
        worker.run(in_flight=2)
        return worker.state(1).tokens

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(2**64 - 1) != tokens(0)


@pytest.mark.parametrize(
    ("breach", "message"),
    [
        (lambda s: s.run(Sequence(0, 5, [1], [9])), "goes on at 5"),
        (lambda s: s.run(Sequence(0, 3, [1], [9])), "goes on at 3"),
        (lambda s: s.run(Sequence(0, 4, [1], [8]), Sequence(0, 5, [1], [9])), "row occurs twice"),
        (lambda s: s.run(Sequence(0, 4, [1, 2], [8, 8])), "slot is written twice"),
        (lambda s: s.run(Sequence(0, 4, [1], [0])), "padding sink"),
        (lambda s: s.run(Sequence(0, 4, [1], [6])), "reads a slot that the same step writes"),
        (lambda s: (s.begin(1, [4, 6]), s.run(Sequence(1, 2, [1], [9]))), "does not hold its position"),
        (lambda s: (s.begin(1, [4, 9]), s.run(Sequence(1, 2, [1], [10]))), "does not hold its position"),
        (lambda s: (s.begin(1), s.run(Sequence(1, 0, [], []))), "computes nothing"),
    ],
)
def test_a_broken_promise_is_noticed(steps: Steps, breach: Callable[[Steps], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        breach(steps)


def test_a_slot_that_was_overwritten_too_early_is_noticed(steps: Steps) -> None:
    """Behaviour 2: another row writes position 2 of the first one's history in place."""
    steps.begin(1)
    steps.run(Sequence(1, 0, [7, 7, 7], [8, 9, 6]))
    with pytest.raises(PlanError, match="different histories"):
        steps.run(Sequence(0, 4, [1], [12]))


def test_steps_come_in_order(steps: Steps) -> None:
    steps.step = 5
    with pytest.raises(PlanError, match="step 6 follows step 1"):
        steps.run(Sequence(0, 4, [1], [8]))


def test_what_a_failed_sequence_wrote_is_not_valid(steps: Steps) -> None:
    steps.runner.faults.nan_sequences[2] = {0}
    steps.begin(1)
    steps.run(Sequence(1, 0, [1, 2, 3, 4], [8, 9, 10, 11]), Sequence(0, 4, [5], [12]))
    steps.begin(2, [8, 9, 10, 11])
    with pytest.raises(PlanError, match="does not hold its position"):
        steps.run(Sequence(2, 4, [5], [16]))


def test_failures_from_the_configuration() -> None:
    config = msgspec.structs.replace(CONFIG, failing_steps=(2,), nan_token=13)
    runner = SimRunner(config, ManualClock())
    plans = []
    for step, tokens in enumerate(([1, 2], [3, 4], [5, 13], [6, 7]), start=1):
        slots = np.arange(4 * step, 4 * step + 2, dtype=np.int32)
        plans.append(
            StepPlan(
                step=step,
                row_starts=(make_start(0, []),),
                rows=np.array([0], dtype=np.int32),
                starts=np.array([0], dtype=np.int32),
                lengths=np.array([2], dtype=np.int32),
                samples=np.array([True]),
                relayed=np.array([False]),
                input_ids=np.array(tokens, dtype=np.int32),
                slots=slots,
            )
        )
    results = [runner.run(plan) for plan in plans]
    assert [result.error is not None for result in results] == [False, True, False, False]
    assert [result.failed.tolist() for result in results] == [[False], [True], [True], [False]]


def test_a_sampled_nan_token_fails_when_it_is_computed() -> None:
    worker = SimWorker()
    tokens, _ = reference(make_submit(1, [1, 2, 3], 6), 50)
    worker.runner._config = msgspec.structs.replace(worker.runner._config, nan_token=tokens[2])
    worker.submit(make_submit(1, [1, 2, 3], 6))
    worker.run(in_flight=2)
    ended = worker.state(1).ended
    assert ended is not None
    assert ended.code == "INTERNAL"
    assert worker.state(1).tokens == tokens[: 1 + tokens.index(tokens[2])]


class TestTime:
    """A step lasts as long as the cost model says, on the clock that it is given."""

    cost = CostModel(step_s=1.0, prefill_token_s=0.1, decode_token_s=0.01, context_token_s=0.001)

    def plan(self) -> StepPlan:
        return StepPlan(
            step=1,
            row_starts=(make_start(0, []), make_start(1, [])),
            rows=np.array([0, 1], dtype=np.int32),
            starts=np.array([9, 0], dtype=np.int32),
            lengths=np.array([1, 5], dtype=np.int32),
            samples=np.array([True, True]),
            relayed=np.array([True, False]),
            input_ids=np.zeros(6, dtype=np.int32),
            slots=np.arange(4, 10, dtype=np.int32),
        )

    def test_the_cost_is_linear(self) -> None:
        assert self.cost.duration_s(self.plan()) == pytest.approx(1.0 + 5 * 0.1 + 0.01 + 10 * 0.001)

    def test_a_prompt_attends_to_all_before_it(self) -> None:
        cost = msgspec.structs.replace(self.cost, prefill_context_token_s=0.0001)
        plan = msgspec.structs.replace(self.plan(), starts=np.array([9, 20], dtype=np.int32))
        attended = 21 + 22 + 23 + 24 + 25
        assert cost.duration_s(plan) == pytest.approx(self.cost.duration_s(plan) + attended * 0.0001)

    def test_decode_steps_in_a_row_cost_what_each_costs(self) -> None:
        def decodes(step: int) -> StepPlan:
            return StepPlan(
                step=step,
                row_starts=(),
                rows=np.array([0, 1], dtype=np.int32),
                starts=np.array([9 + step, 4 + step], dtype=np.int32),
                lengths=np.ones(2, dtype=np.int32),
                samples=np.ones(2, dtype=np.bool_),
                relayed=np.ones(2, dtype=np.bool_),
                input_ids=np.zeros(2, dtype=np.int32),
                slots=np.arange(2, dtype=np.int32),
            )

        cost = CostModel(step_s=0.0061, decode_token_s=3.3e-5, context_token_s=5.1e-8)
        together = cost.decode_durations_s(2, 15, 50).tolist()
        assert together == [cost.duration_s(decodes(step)) for step in range(50)]

    def test_virtual_time_moves_on(self) -> None:
        clock = ManualClock(100.0)
        runner = SimRunner(msgspec.structs.replace(CONFIG, cost=self.cost, verify=False, load_s=7.0), clock)
        runner.load()
        assert clock.now() == 107.0
        result = runner.run(self.plan())
        assert (result.started_s, result.ended_s) == (107.0, pytest.approx(108.52))

    def test_real_time_passes(self) -> None:
        cost = CostModel(step_s=0.02, prefill_token_s=0.0, decode_token_s=0.0, context_token_s=0.0)
        runner = SimRunner(msgspec.structs.replace(CONFIG, cost=cost, verify=False), MonotonicClock())
        before = time.monotonic()
        result = runner.run(self.plan())
        assert result.ended_s - result.started_s > 0.0199  # less than 0.02 by rounding, more on a busy machine
        assert before <= result.started_s <= result.ended_s <= time.monotonic()

    def test_a_step_handed_over_in_time_begins_when_the_one_before_ends(self) -> None:
        """As on a CUDA stream: what the processes around the device do meanwhile costs it nothing."""
        clock = ManualClock(100.0)
        cost = CostModel(step_s=1.0, prefill_token_s=0.0, decode_token_s=0.0, context_token_s=0.0)
        runner = SimRunner(msgspec.structs.replace(CONFIG, cost=cost, verify=False), clock)
        runner.enqueue(self.plan())
        clock.advance(0.75)
        runner.enqueue(msgspec.structs.replace(self.plan(), step=2))
        assert runner.time_left_s() == 0.25
        results = [runner.collect(), runner.collect()]
        assert [(each.started_s, each.ended_s) for each in results] == [(100.0, 101.0), (101.0, 102.0)]
        assert clock.now() == 102.0
        clock.advance(0.5)
        late = runner.run(msgspec.structs.replace(self.plan(), step=3))
        assert late.started_s == 102.5, "a step that comes late finds the device idle"

    def test_without_a_cost_no_time_passes(self) -> None:
        clock = ManualClock(3.0)
        SimRunner(msgspec.structs.replace(CONFIG, verify=False), clock).run(self.plan())
        assert clock.now() == 3.0


class TestLoading:
    """What it says of itself."""

    def test_capacity_and_pools(self) -> None:
        ready = SimRunner(CONFIG, ManualClock()).load()
        assert (ready.capacity.kv_tokens, ready.capacity.page_size) == (64, 4)
        assert ready.max_context_tokens == 64
        pools = ready.memory
        assert pools.total_bytes == pools.weights_bytes + pools.kv_bytes + pools.activations_bytes

    def test_the_context_is_bounded_by_the_pool(self) -> None:
        config = msgspec.structs.replace(CONFIG, max_context_tokens=5_000)
        assert SimRunner(config, ManualClock()).load().max_context_tokens == 64

    @pytest.mark.parametrize("kv_tokens", [0, 63])
    def test_a_pool_that_is_not_whole_pages_is_refused(self, kv_tokens: int) -> None:
        with pytest.raises(ValueError, match="page_size 4"):
            SimRunner(msgspec.structs.replace(CONFIG, kv_tokens=kv_tokens), ManualClock()).load()

    def test_its_configuration_travels(self) -> None:
        config = SimRunnerConfig(cost=CostModel(step_s=0.5), failing_steps=(3, 4), nan_token=9)
        assert msgspec.json.decode(msgspec.json.encode(config), type=SimRunnerConfig) == config

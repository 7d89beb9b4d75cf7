"""The order in which a device with a queue is driven, on a stream that moves only when a test moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from radixfleet.clock import ManualClock
from tests.support.device_marks import Stream
from worker.core.step import StepPlan
from worker.runner.protocol import StepQueue
from worker.runner.step_queue import DeviceQueue
from worker.runner.step_sampler import Drawn, Sampled


def plan(step: int) -> StepPlan:
    """One row that decodes."""
    one = np.array([0], np.int32)
    return StepPlan(step, (), one, one + step, one + 1, one == 0, one == 0, one, one + 16)


class RelayComputer:
    """Each step adds 1 to the token in the relay, on the stream. Notes what the host does, and in which order."""

    device = torch.device("cpu")
    in_sampling = False

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._relay = 100
        self.notes: list[str] = []
        self.constrained: set[int] = set()
        self.failing: dict[int, Exception] = {}

    def launch(self, plan: StepPlan, settle_before: Callable[[], None] | None = None) -> Drawn:
        self._stream.launch(lambda: self.notes.append(f"layers {plan.step}"))
        if plan.step in self.failing:
            raise self.failing[plan.step]
        if plan.step in self.constrained and settle_before is not None:
            self.notes.append(f"host waits in {plan.step}")
            settle_before()
        tokens = torch.zeros(1, dtype=torch.int64)
        self._stream.launch(lambda: self._sample(plan, tokens))
        return Drawn(begun=cast("Any", plan), tokens=tokens, failed=torch.zeros(1, dtype=torch.bool), told=[])

    def _sample(self, plan: StepPlan, tokens: torch.Tensor) -> None:
        self._relay += 1
        tokens[0] = self._relay
        self.notes.append(f"sample {plan.step}")

    def settle(self, drawn: Drawn) -> Sampled:
        self.notes.append(f"settle {cast('Any', drawn.begun).step}")
        return Sampled(drawn.tokens.int().numpy(), drawn.failed.numpy())


class Driven:
    """A queue with the stream and the clock that drive it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stream = Stream(self.clock)
        self.computer = RelayComputer(self.stream)
        self.queue = DeviceQueue(self.computer, self.stream.mark, self.clock)

    def token(self) -> int:
        return int(self.queue.collect().token_ids[0])


@pytest.fixture
def driven() -> Driven:
    return Driven()


def test_it_is_a_step_queue(driven: Driven) -> None:
    assert isinstance(driven.queue, StepQueue)


def test_a_step_begins_with_the_token_of_the_one_before_though_no_host_has_seen_it(driven: Driven) -> None:
    """Two steps are handed over before the device has done anything; then it needs nobody."""
    driven.queue.enqueue(plan(1))
    driven.queue.enqueue(plan(2))
    assert driven.computer.notes == []
    assert driven.stream.waits == 0
    driven.stream.finish()
    assert driven.computer.notes == ["layers 1", "sample 1", "layers 2", "sample 2"]
    assert [driven.token(), driven.token()] == [101, 102]
    assert driven.stream.waits == 0


def test_collecting_waits_for_its_own_step_alone(driven: Driven) -> None:
    for step in (1, 2):
        driven.queue.enqueue(plan(step))
    assert driven.token() == 101
    assert driven.computer.notes == ["layers 1", "sample 1", "settle 1"]


def test_masks_wait_for_tokens_while_the_device_computes_the_layers(driven: Driven) -> None:
    """Of the steps before; the layers of their own step are launched by then."""
    driven.computer.constrained = {2}
    driven.queue.enqueue(plan(1))
    driven.queue.enqueue(plan(2))
    assert driven.computer.notes == ["host waits in 2", "layers 1", "sample 1", "settle 1"]
    assert driven.stream.work[driven.stream.num_done :], "the layers of step 2 are launched behind"
    assert [driven.token(), driven.token()] == [101, 102]
    assert driven.computer.notes.count("settle 1") == 1


def test_a_step_that_waits_for_tokens_lies_ready_from_when_it_waits(driven: Driven) -> None:
    """Else pacing takes each step with a grammar for one that was planned too late."""
    driven.stream.launch(lambda: driven.clock.advance(1.0))
    driven.computer.constrained = {2}
    began_s = driven.clock.now()
    driven.queue.enqueue(plan(1))
    driven.queue.enqueue(plan(2))
    assert driven.clock.now() == began_s + 1.0
    first, second = driven.queue.collect(), driven.queue.collect()
    assert second.ready_s == began_s < first.ended_s


def test_a_first_step_waits_for_nobody(driven: Driven) -> None:
    driven.computer.constrained = {1}
    driven.queue.enqueue(plan(1))
    assert driven.computer.notes == []


def test_a_step_that_cannot_be_launched_keeps_its_place(driven: Driven) -> None:
    """Behaviour 62: those behind it are computed."""
    driven.computer.failing = {2: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")}
    for step in (1, 2, 3):
        driven.queue.enqueue(plan(step))
    results = [driven.queue.collect() for _ in range(3)]
    assert [result.step for result in results] == [1, 2, 3]
    assert [result.error is None for result in results] == [True, False, True]
    assert results[1].out_of_memory is not None
    assert results[1].out_of_memory.needed_bytes == 2 << 20
    assert results[1].failed.all()
    assert int(results[2].token_ids[0]) == 102


def test_a_device_that_is_broken_ends_the_runner(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised by its marks is not the step's failure but the device's."""
    driven.queue.enqueue(plan(1))

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(driven.stream, "advance", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        driven.queue.collect()


def test_times_are_those_of_the_device(driven: Driven) -> None:
    """A step that waited behind another begins when that one ends, whenever it is collected."""
    driven.queue.enqueue(plan(1))
    driven.queue.enqueue(plan(2))
    for _ in range(len(driven.stream.work)):
        driven.clock.advance(1.0)
        driven.stream.advance()
    driven.clock.advance(50.0)
    first, second = driven.queue.collect(), driven.queue.collect()
    began_s = first.started_s
    assert (first.ended_s - began_s, second.started_s - began_s, second.ended_s - began_s) == (3.0, 4.0, 7.0)


def test_who_waits_learns_how_long(driven: Driven) -> None:
    """Never later than the step ends, as far as the one before it foretells; 0 once it has."""
    driven.queue.enqueue(plan(1))
    assert 0 < driven.queue.time_left_s() < 0.001
    driven.stream.advance()
    driven.clock.advance(0.02)
    driven.stream.finish()
    assert driven.queue.time_left_s() == 0
    driven.queue.collect()
    driven.queue.enqueue(plan(2))
    assert driven.queue.time_left_s() == pytest.approx(0.01)
    driven.clock.advance(0.019)
    assert driven.queue.time_left_s() == pytest.approx(0.0005)
    driven.clock.advance(5)
    assert 0 < driven.queue.time_left_s() < 0.001

"""The runner's side of the socket, where the device has a queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from radixfleet.types import Grammar
from worker.core import codec
from worker.core.messages import Ready
from worker.core.step import LayersComputed, StepPlan, StepResult
from worker.engine.executors import ProcessExecutor
from worker.engine.runner_process import run_steps
from worker.engine.wire import FrameSocket
from worker.runner.protocol import StepQueue


class HandDriven:
    """A device whose steps end when the test says so."""

    def __init__(self) -> None:
        self.enqueued: SimpleQueue[int] = SimpleQueue()
        self.may_end = 0
        self._queue: deque[int] = deque()

    def load(self) -> Ready:
        raise AssertionError("it is loaded already")

    def run(self, plan: StepPlan) -> StepResult:
        raise AssertionError("it has a queue")

    def enqueue(self, plan: StepPlan) -> None:
        self._queue.append(plan.step)
        self.enqueued.put(plan.step)

    def time_left_s(self) -> float:
        return 0.0 if self._queue[0] <= self.may_end else 0.001

    def collect(self) -> StepResult:
        step = self._queue.popleft()
        assert step <= self.may_end, "collected before its end"
        return StepResult(step, np.array([step], dtype=np.int32), np.zeros(1, dtype=np.bool_), 0.0, 0.0)

    def prepare(self, grammar: Grammar) -> str:
        raise AssertionError("no grammar was sent")

    def close(self) -> None:
        """Nothing to free."""


def plan(step: int) -> StepPlan:
    one = np.ones(1, dtype=np.int32)
    flags = np.ones(1, dtype=np.bool_)
    return StepPlan(step, (), one, one, one, flags, flags, one, one)


def step_of(frame: bytes) -> int:
    answer = codec.decode_answer(frame)
    assert isinstance(answer, StepResult)
    return answer.step


def receive(end: FrameSocket) -> list[int]:
    frames: list[bytes] = []
    while not frames:  # it may have sent what was queued instead
        end.wait_readable()
        frames = end.receive()
    return [step_of(frame) for frame in frames]


def test_the_next_step_is_handed_over_while_one_runs() -> None:
    ours, theirs = FrameSocket.pair()
    runner = HandDriven()
    assert isinstance(runner, StepQueue)
    end = FrameSocket(theirs)
    thread = threading.Thread(target=run_steps, args=(runner, end))
    thread.start()
    ours.send(codec.encode(plan(1)))
    assert runner.enqueued.get(timeout=60) == 1
    ours.send(codec.encode(plan(2)))
    assert runner.enqueued.get(timeout=60) == 2, "step 1 has not ended"
    assert not ours.receive()
    runner.may_end = 1
    assert receive(ours) == [1]
    ours.send(codec.encode(plan(3)))
    assert runner.enqueued.get(timeout=60) == 3
    runner.may_end = 3
    ended: list[int] = []
    while len(ended) < 2:
        ended += receive(ours)
    assert ended == [2, 3]
    ours.close()
    thread.join(timeout=60)
    assert not thread.is_alive(), "it ends when the engine is gone"
    end.close()


class Talkative:
    """A runner on the machine's cores: it says that a step's layers are computed, and ends it."""

    def load(self) -> Ready:
        raise AssertionError("it is loaded already")

    def tell_layers_computed(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def run(self, plan: StepPlan) -> StepResult:
        self._tell()
        return StepResult(plan.step, np.ones(1, np.int32), np.zeros(1, np.bool_), 0.0, 0.0)

    def prepare(self, grammar: Grammar) -> str:
        raise AssertionError("no grammar was sent")

    def close(self) -> None:
        """Nothing to free."""


def test_the_engine_hears_that_a_steps_layers_are_computed_and_then_its_result() -> None:
    ours, theirs = FrameSocket.pair()
    end = FrameSocket(theirs)
    thread = threading.Thread(target=run_steps, args=(Talkative(), end))
    thread.start()
    executor = ProcessExecutor(ours)
    executor.launch(plan(1))
    num_words, results = 0, list[StepResult]()
    while not results:
        ours.wait_readable()
        results += executor.results()
        num_words += executor.take_layers_computed()
    assert [result.step for result in results] == [1]
    assert num_words <= 1, "word and result may come at once: then the word is of no use any more"
    assert not executor.take_layers_computed(), "it is told once"
    ours.close()
    thread.join(timeout=60)
    end.close()


def test_a_runners_word_is_told_once_and_is_worth_nothing_once_the_result_is_there() -> None:
    ours, theirs = FrameSocket.pair()
    runner = FrameSocket(theirs)
    executor = ProcessExecutor(ours)
    result = StepResult(1, np.ones(1, np.int32), np.zeros(1, np.bool_), 0.0, 0.0)
    runner.send(codec.encode(LayersComputed()))
    assert executor.results() == []
    assert executor.take_layers_computed()
    assert not executor.take_layers_computed()
    runner.send(codec.encode(LayersComputed()))
    runner.send(codec.encode(result))
    assert [each.step for each in executor.results()] == [1]
    assert not executor.take_layers_computed()
    runner.send(codec.encode(LayersComputed()))
    assert executor.results() == []
    assert executor.take_layers_computed(), "of the step after it"
    ours.close()
    runner.close()

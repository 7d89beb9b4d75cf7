"""The queue of a CUDA device against the same steps one by one, and what it hides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from radixfleet.clock import MonotonicClock
from tests.support.runner_driver import RunnerDriver
from tests.support.scarce_memory import LoadedRunner, ScheduledRunner
from tests.support.sim_worker import make_submit
from tests.support.tiny_model import tiny_model
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.runner.protocol import StepQueue
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import QueuedTorchRunner, make_torch_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def config() -> TorchRunnerConfig:
    """In float32, so that no greedy choice hangs on how sums of another batch are rounded."""
    return TorchRunnerConfig(
        model_path=str(tiny_model(max_context=2048, hidden_size=256)),
        device="cuda",
        dtype="float32",
        device_memory_bytes=4 << 30,
        max_total_tokens=65_536,
        max_running_requests=64,
        chunked_prefill_size=512,
    )


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[QueuedTorchRunner, Ready]]:
    runner = make_torch_runner(config(), MonotonicClock())
    assert isinstance(runner, QueuedTorchRunner)
    yield runner, runner.load()
    runner.close()
    torch.cuda.empty_cache()


class Queued(LoadedRunner):
    """Whose next step is handed over before the result of the last is asked for, as a runner process does it."""

    def __init__(self, runner: QueuedTorchRunner, ready: Ready) -> None:
        super().__init__(runner, ready)
        self._queue = runner

    def launch(self, plan: StepPlan) -> None:
        self._queue.enqueue(plan)

    def run(self, plan: StepPlan) -> StepResult:
        result = self._queue.collect()
        assert result.step == plan.step
        return result


class Recorded(LoadedRunner):
    """Which computes nothing: to have plans made."""

    def __init__(self, runner: QueuedTorchRunner, ready: Ready) -> None:
        super().__init__(runner, ready)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        nothing = np.zeros(plan.num_sequences, np.int32)
        return StepResult(plan.step, nothing, nothing.astype(np.bool_), 0.0, 0.0)


def tokens_of(runner: LoadedRunner, in_flight: int, *, temperature: float) -> dict[int, Sequence[int]]:
    random = np.random.default_rng(1)
    scheduled = ScheduledRunner(runner, in_flight=in_flight)
    scheduled.serve(
        make_submit(uid, random.integers(3, 500, 40 + 17 * uid), 32, temperature=temperature, seed=uid)
        for uid in range(24)
    )
    return scheduled.tokens()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_steps_in_flight_give_the_tokens_of_one(
    loaded: tuple[QueuedTorchRunner, Ready], temperature: float
) -> None:
    """Steps are the same with one and two in flight but for when a request ends: rows of others move in the batch."""
    serial = tokens_of(LoadedRunner(*loaded), 1, temperature=temperature)
    overlapped = tokens_of(Queued(*loaded), 2, temperature=temperature)
    assert serial.keys() == overlapped.keys()
    assert sum(serial[uid] == overlapped[uid] for uid in serial) >= 22


def test_the_device_does_not_wait_between_two_steps(loaded: tuple[QueuedTorchRunner, Ready]) -> None:
    """The gap between the end of a step and the beginning of the next that lay behind it, on the device's clock."""
    runner = loaded[0]
    assert isinstance(runner, StepQueue)
    recorded = Recorded(*loaded)
    driver = RunnerDriver(recorded)
    for row in range(32):
        driver.begin(row, list(range(3, 203)))
    driver.step(dict.fromkeys(range(32), 200))
    for _ in range(40):
        driver.step(dict.fromkeys(range(32), 0))
    results = []
    first, *others = recorded.plans
    runner.enqueue(first)
    for plan in others:
        runner.enqueue(plan)
        results.append(runner.collect())
    results.append(runner.collect())
    assert not any(result.error for result in results)
    gaps_s = [after.started_s - before.ended_s for before, after in pairwise(results[10:])]
    steps_s = [result.ended_s - result.started_s for result in results[10:]]
    assert np.median(gaps_s) < 0.01 * np.median(steps_s) + 20e-6

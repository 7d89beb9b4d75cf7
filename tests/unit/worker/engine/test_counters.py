"""How the time of steps, and between them, is accounted."""

from __future__ import annotations

import numpy as np
import pytest

from worker.core.step import StepResult
from worker.engine.counters import LoopCounters, StepTimes


def result(started_s: float, ended_s: float, error: str | None = None) -> StepResult:
    return StepResult(1, np.empty(0, np.int32), np.empty(0, np.bool_), started_s, ended_s, error)


@pytest.fixture
def counters() -> LoopCounters:
    return LoopCounters()


@pytest.fixture
def times(counters: LoopCounters) -> StepTimes:
    return StepTimes(counters)


def test_the_bubble_is_the_devices_idle_time_between_two_steps(counters: LoopCounters, times: StepTimes) -> None:
    times.work_came(10.0)
    times.ended(result(10.5, 11.0))
    times.ended(result(11.25, 12.25))
    assert times.take() == ([0.5, 1.0], [0.5, 0.25])
    assert (counters.steps, counters.step_s, counters.bubble_s) == (2, 1.5, 0.75)


def test_waiting_for_work_is_no_bubble(counters: LoopCounters, times: StepTimes) -> None:
    times.work_came(0.0)
    times.ended(result(0.0, 1.0))
    times.work_came(50.0)
    times.ended(result(50.0, 51.0))
    assert counters.bubble_s == 0


def test_steps_that_follow_without_a_gap_have_no_bubble(counters: LoopCounters, times: StepTimes) -> None:
    times.work_came(0.0)
    times.ended(result(0.0, 1.0))
    times.ended(result(1.0, 2.0))
    assert counters.bubble_s == 0


def test_taken_times_are_not_taken_again(times: StepTimes) -> None:
    times.ended(result(0.0, 1.0))
    times.take()
    assert times.take() == ([], [])


def test_failed_steps_are_counted_apart(counters: LoopCounters, times: StepTimes) -> None:
    times.ended(result(0.0, 1.0, error="out of memory"))
    times.ended(result(1.0, 2.0))
    assert counters.as_dict()["failed_steps"] == 1
    assert counters.as_dict()["steps"] == 2

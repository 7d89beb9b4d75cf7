"""When the next step is planned, in virtual time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from worker.core.step import StepResult
from worker.engine.pacing import Pacing


class Device:
    """Steps one after another. Each lies ready before or after the end of the one before, and begins then."""

    def __init__(self) -> None:
        self.pacing = Pacing()
        self.now_s = 100.0
        """When the last step ended."""

    def step(self, num_tokens: int, duration_s: float, *, late_s: float = -1e-3, was_due: bool = False) -> None:
        """It lies ready `late_s` after the end of the one before."""
        self.pacing.launched(num_tokens, self.now_s + late_s, was_due=was_due)
        self.end(duration_s, self.now_s + max(0.0, late_s))

    def end(self, duration_s: float, started_s: float, ready_s: float = 0.0) -> None:
        self.now_s = started_s + duration_s
        nothing = np.empty(0, np.int32)
        self.pacing.ended(StepResult(1, nothing, nothing.astype(np.bool_), started_s, self.now_s, ready_s=ready_s))

    def expected_s(self, num_tokens: int) -> float:
        """What a step that is launched now is expected to take, the margin taken off."""
        self.pacing.launched(num_tokens, self.now_s, was_due=False)
        expected_s = self.pacing.due_s - self.now_s
        self.end(1.0, self.now_s)
        return expected_s


@pytest.fixture
def device() -> Device:
    return Device()


def test_nobody_waits_while_nothing_is_known(device: Device) -> None:
    assert device.expected_s(8) < 0


def test_the_next_step_is_due_a_margin_before_the_end_that_the_last_ones_make_one_expect(device: Device) -> None:
    device.step(8, 0.030)
    margin_s = device.pacing.margin_s
    assert 0 < margin_s < 0.005
    assert device.expected_s(8) == pytest.approx(0.030 - margin_s)


def test_a_step_that_lies_ready_begins_when_the_one_before_it_ends(device: Device) -> None:
    device.step(8, 0.030)
    device.pacing.launched(8, device.now_s, was_due=False)
    device.pacing.launched(8, device.now_s + 0.001, was_due=False)
    device.end(0.030, device.now_s)
    assert device.pacing.due_s == pytest.approx(device.now_s + 0.030 - device.pacing.margin_s)


def test_the_fastest_of_the_last_steps_counts(device: Device) -> None:
    for duration_s in (0.030, 0.050, 0.028, 0.090):
        device.step(8, duration_s)
    assert device.expected_s(8) == pytest.approx(0.028 - device.pacing.margin_s)


def test_a_step_that_was_long_ago_is_forgotten(device: Device) -> None:
    device.step(8, 0.010)
    for _ in range(20):
        device.step(8, 0.040)
    assert device.expected_s(8) == pytest.approx(0.040 - device.pacing.margin_s)


def test_a_step_of_a_new_size_takes_at_least_what_a_smaller_one_takes(device: Device) -> None:
    device.step(8, 0.030)
    device.step(500, 0.150)
    assert device.expected_s(64) == pytest.approx(0.030 - device.pacing.margin_s)
    assert device.expected_s(4) < 0


def test_a_late_step_widens_the_margin_and_those_on_time_narrow_it_slowly(device: Device) -> None:
    device.step(8, 0.030)
    first_s = device.pacing.margin_s
    device.step(8, 0.030, late_s=0.002, was_due=True)
    assert device.pacing.margin_s == 2 * first_s
    for _ in range(50):
        device.step(8, 0.030, was_due=True)
    assert first_s < device.pacing.margin_s < 1.5 * first_s
    for _ in range(1000):
        device.step(8, 0.030, was_due=True)
    assert 0 < device.pacing.margin_s < first_s


def test_a_step_is_late_too_when_the_device_had_it_whole_too_late(device: Device) -> None:
    """A launch of many kernels ends long after the plan came."""
    device.step(8, 0.030)
    margin_s = device.pacing.margin_s
    device.pacing.launched(8, device.now_s - 0.010, was_due=True)
    device.end(0.030, device.now_s, ready_s=device.now_s + 0.001)
    assert device.pacing.margin_s == 2 * margin_s


def test_the_margin_learns_nothing_from_steps_that_were_not_held_back(device: Device) -> None:
    """A device that idles because nobody asks says nothing about how long planning takes."""
    device.step(8, 0.030)
    margin_s = device.pacing.margin_s
    device.step(8, 0.030, late_s=5.0)
    device.step(8, 0.030)
    assert device.pacing.margin_s == margin_s


def test_the_margin_is_bounded(device: Device) -> None:
    device.step(8, 0.030)
    for _ in range(100):
        device.step(8, 0.030, late_s=0.010, was_due=True)
    assert device.pacing.margin_s <= 0.1
    assert device.expected_s(8) < 0


def test_a_machine_that_stood_still_for_a_moment_does_not_end_the_waiting_for_good(device: Device) -> None:
    """The margin has outgrown the steps, so that each is planned at once. They lie ready in time: it narrows again."""
    device.step(8, 0.030)
    for _ in range(10):
        device.step(8, 0.030, late_s=0.010, was_due=True)
    num_planned_at_once = 0
    device.pacing.launched(8, device.now_s, was_due=False)
    while device.pacing.due_s <= device.now_s:
        device.pacing.launched(8, device.now_s, was_due=False)  # beside the one in flight
        device.end(0.030, device.now_s)
        num_planned_at_once += 1
        assert num_planned_at_once < 500
    assert num_planned_at_once > 10


def test_steps_that_are_planned_at_once_and_late_all_the_same_widen_nothing(device: Device) -> None:
    """Planning that takes longer than a step cannot begin earlier than at once."""
    device.step(8, 0.030)
    margin_s = device.pacing.margin_s
    device.pacing.launched(8, device.now_s, was_due=False)
    for _ in range(10):
        device.pacing.launched(8, device.now_s + 0.031, was_due=False)
        device.end(0.030, device.now_s)
    assert device.pacing.margin_s == margin_s


@pytest.mark.parametrize("takes_s", [0.0003, 0.003, 0.012])
def test_few_steps_are_late_whatever_planning_and_launching_take(device: Device, takes_s: float) -> None:
    """The device idles before at most 2 of 100 steps, and for 0.1 % of the time; planning is late in a step."""
    num_late, idle_s, waited_s, started_s = 0, 0.0, 0.0, device.now_s
    device.pacing.launched(8, started_s, was_due=False)
    device.end(0.030, started_s)
    device.pacing.launched(8, device.now_s, was_due=False)
    started_s = device.now_s
    for _ in range(2000):
        due_s = device.pacing.due_s
        device.pacing.launched(8, due_s + takes_s, was_due=True)
        device.end(0.030, started_s)
        late_s = due_s + takes_s - device.now_s
        num_late, idle_s = num_late + (late_s > 0), idle_s + max(0.0, late_s)
        waited_s += due_s - started_s
        started_s = device.now_s + max(0.0, late_s)
    assert num_late <= 0.02 * 2000
    assert idle_s <= 0.001 * 2000 * 0.030
    assert waited_s / 2000 > 0.030 - 2 * takes_s - 0.003


def test_what_a_runner_says_counts_and_no_expectation_does(device: Device) -> None:
    """Its steps are followed when it says that their layers are computed, however long they take."""
    device.step(8, 0.030)
    device.pacing.launched(8, device.now_s, was_due=False)
    assert device.pacing.due_s < device.now_s + 0.030
    device.pacing.layers_computed()
    assert device.pacing.due_s == -math.inf
    device.end(0.030, device.now_s)
    device.pacing.launched(8, device.now_s, was_due=False)
    assert device.pacing.due_s == math.inf


def test_of_a_runner_that_tells_nothing_is_learnt(device: Device) -> None:
    """Its steps are held back until it says something, which makes none of them late."""
    device.step(8, 0.030)
    margin_s = device.pacing.margin_s
    device.pacing.launched(8, device.now_s, was_due=False)
    device.pacing.layers_computed()
    device.end(0.030, device.now_s)
    for _ in range(10):
        device.step(8, 0.030, late_s=0.010, was_due=True)
    assert device.pacing.margin_s == margin_s

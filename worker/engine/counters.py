"""Totals since the engine's start, as `Report.counters` carries them: the loop's own, beside those of the scheduler.

from the loop       steps            device steps that ended
                    failed_steps     of those, steps that failed as a whole
                    step_s           seconds that the device spent in steps
                    bubble_s         seconds that the device idled while work was waiting or running
                    scheduling_s     seconds that the engine's thread spent on ingesting, planning and settling
from the scheduler  see `worker.scheduling.counters.Counters`
"""

from __future__ import annotations

import msgspec

from worker.core.step import StepResult


class LoopCounters(msgspec.Struct):
    """The loop's totals. Names are those in `Report.counters`."""

    steps: int = 0
    failed_steps: int = 0
    step_s: float = 0.0
    bubble_s: float = 0.0
    scheduling_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return msgspec.structs.asdict(self)


class StepTimes:
    """Durations of steps, and of the bubbles before them, since they were last taken.

    The bubble before a step is the time from the end of the step before it, or from when work came to an idle engine if
    that is later, to the step's start. All times are the runner's, by the monotonic clock that the processes share.
    """

    def __init__(self, counters: LoopCounters) -> None:
        self._counters = counters
        self._last_end_s = 0.0
        self._work_since_s = 0.0
        self._step_s: list[float] = []
        self._bubble_s: list[float] = []

    def work_came(self, now_s: float) -> None:
        """Take note that an engine without work got some at `now_s`."""
        self._work_since_s = now_s

    def ended(self, result: StepResult) -> None:
        """Count a step that ended, and the bubble before it."""
        step_s = result.ended_s - result.started_s
        bubble_s = max(0.0, result.started_s - max(self._last_end_s, self._work_since_s))
        self._last_end_s = result.ended_s
        self._step_s.append(step_s)
        self._bubble_s.append(bubble_s)
        self._counters.steps += 1
        self._counters.failed_steps += result.error is not None
        self._counters.step_s += step_s
        self._counters.bubble_s += bubble_s

    def take(self) -> tuple[list[float], list[float]]:
        """The steps' durations and the bubbles before them since the last call."""
        taken = self._step_s, self._bubble_s
        self._step_s, self._bubble_s = [], []
        return taken

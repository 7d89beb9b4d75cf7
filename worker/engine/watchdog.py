"""Tells an engine that is stuck from one that is idle or slow, by its reports, and a load that hangs from one that is
slow, by the work of its processes. Pure: the caller keeps the time.
"""

from __future__ import annotations

from worker.core.messages import Report

_IDLE_SHARE = 0.05


class Watchdog:
    """Counts the time without progress, one tick at a time.

    There is progress when a report has come since the last tick and either the engine has nothing to do or it has ended
    a step since. So this sees an engine that says nothing (stopped, spinning), one whose runner does not answer (a step
    in flight for ever), and one that has work but plans none. Silence is counted by itself too: the engine's loop
    reports twice a second whatever its runner does, so silence tells sooner. A runner that computes for long (a
    compilation, a long prompt) looks like one that is stopped, but not to the system, which is asked: a runner process
    that a signal has stopped makes no progress. Time is counted in ticks that were really made: a front that itself
    stood still for a minute does not take its engine for dead.
    """

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._report: Report | None = None
        self._steps = 0.0
        self.still_s = 0.0
        """How long there has been no progress."""
        self.silent_s = 0.0
        """How long there has been no report."""
        self.stopped_s = 0.0
        """How long the runner process has been stopped."""

    def tick(self, newest: Report | None, *, is_runner_stopped: bool = False) -> None:
        """`tick_s` have passed; `newest` is the last report of this incarnation."""
        heard = newest is not None and newest is not self._report
        progress = newest is not None and heard and self._moved(newest) and not is_runner_stopped
        self.stopped_s = self.stopped_s + self._tick_s if is_runner_stopped else 0.0
        self.silent_s = 0.0 if heard else self.silent_s + self._tick_s
        self.still_s = 0.0 if progress else self.still_s + self._tick_s
        self._report = newest

    def _moved(self, report: Report) -> bool:
        steps, self._steps = self._steps, report.counters["steps"]
        load = report.load
        has_work = report.step_age_s > 0 or load.running_requests > 0 or load.waiting_requests > 0
        return not has_work or report.counters["steps"] > steps


class LoadWatch:
    """Counts the time in which a load does nothing, one tick at a time.

    Loading takes seconds or an hour, as the model and its disk are, so no limit to its time fits; but all that it does
    takes processor time or reads. A process that only waits takes some processor time too, to look around: less than a
    twentieth of the time does not count. Where the system does not tell what they do there are no ticks: a load that
    waits for a slow disk would look like one that hangs.
    """

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._cpu_s = 0.0
        self._read_bytes = 0
        self.still_s = 0.0
        """How long it has done nothing."""

    def tick(self, cpu_s: float, read_bytes: int) -> None:
        """`tick_s` have passed; its processes have taken `cpu_s` of processor time and read so much, in all."""
        self.still_s += self._tick_s
        # Less in all than before: one has ended, and what the others do from now on counts.
        self._cpu_s, self._read_bytes = min(cpu_s, self._cpu_s), min(read_bytes, self._read_bytes)
        if cpu_s - self._cpu_s >= _IDLE_SHARE * self.still_s or read_bytes > self._read_bytes:
            self.still_s = 0.0
            self._cpu_s, self._read_bytes = cpu_s, read_bytes

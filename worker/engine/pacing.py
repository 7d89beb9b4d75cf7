"""When to plan the next step: as late as the device allows, so that who comes meanwhile is in it.

Overlapped, step N+1 is planned while step N computes. Planned right after N was launched, it is closed to all that come
while N computes, and they wait for the rest of N and for all of N+1. Nothing is won by being so early: it is enough
that the plan lies with the runner when N ends. So planning waits until

    expected end of step N - margin

Expected end: N began when it was launched or when the step before it ended, whichever was later, and takes at least
what the fastest of the last few steps of its size took. Steps of a size that is not known take at least as long as
smaller ones; where none is known, there is no wait. A step that ends sooner than expected is heard at once, and the
next is planned then: an idle device for as long as planning takes, and the expectation is corrected.

Margin: covers planning, the way to the runner, waking up late, and launching. Nobody knows these beforehand, so it is
learnt from the steps: doubled when one that was planned when it was due lay ready too late, and a little less with each
that was planned beside another and did not. Those planned at once count there, for a margin that has outgrown the steps
(the machine stood still for a moment) has each of them planned at once.

A runner that computes on the machine's own cores says itself when a step's layers are computed: all that the engine
does while many threads compute is taken from one of them, and the others wait for it. After the layers most of what is
left (tokens are drawn, the result is sent) takes one thread, as does how the next step begins, and planning then takes
little from anybody. No expectation is so sharp: with such a runner, its word alone counts, and nothing is learnt.

Pure; used by the engine's loop alone.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from worker.core.step import StepResult

_AHEAD_S = 0.3e-3
"""A step that is ready less than this before the end of the one before is late: so long is the way to the runner."""
_FIRST_MARGIN_S = 2e-3
_LEAST_MARGIN_S = 1e-3
_MOST_MARGIN_S = 0.1
_SHRINKS_BY = 1 / 128
_SIZES_PER_OCTAVE = 4
_REMEMBERED = 16
"""Steps of a size."""


class Pacing:
    """Told of each step that is launched and that ended, in order."""

    def __init__(self) -> None:
        self.margin_s = _FIRST_MARGIN_S
        self._durations: dict[int, deque[float]] = {}
        """Durations in seconds of the last steps, by the step's size."""
        self._in_flight: deque[_InFlight] = deque()
        self._last_end_s = -math.inf
        self._runner_tells = False
        """The runner has said at least once that a step's layers are computed. From then on its word decides when to
        plan, and no longer the expected durations."""
        self._layers_computed = False
        """The runner has said that the layers of the oldest step in flight are computed."""

    @property
    def due_s(self) -> float:
        """When to plan the step after the one in flight; long past where there is no reason to wait.

        To be asked while one step is in flight.
        """
        if self._runner_tells:
            return -math.inf if self._layers_computed else math.inf
        running = self._in_flight[0]
        began_s = max(running.launched_s, self._last_end_s)
        return began_s + self._at_least_s(running.size) - self.margin_s

    def launched(self, num_tokens: int, at_s: float, *, was_due: bool) -> None:
        """A step of so many tokens was handed over. `was_due`: it was held back until `due_s`."""
        self._in_flight.append(_InFlight(_size_of(num_tokens), at_s, was_due, is_beside=bool(self._in_flight)))

    def layers_computed(self) -> None:
        """The runner says so of the oldest of the steps in flight."""
        self._runner_tells = self._layers_computed = True

    def ended(self, result: StepResult) -> None:
        """The oldest of the steps in flight has ended."""
        step = self._in_flight.popleft()
        self._layers_computed = False
        if not self._runner_tells:
            self._learn(step, result)

    def _learn(self, step: _InFlight, result: StepResult) -> None:
        """How long steps of its size take, and whether the margin does."""
        is_late = max(step.launched_s, result.ready_s) > self._last_end_s - _AHEAD_S
        if step.was_due and is_late:
            self.margin_s = min(2 * self.margin_s, _MOST_MARGIN_S)
        elif (step.was_due or step.is_beside) and not is_late:
            self.margin_s = max(self.margin_s * (1 - _SHRINKS_BY), _LEAST_MARGIN_S)
        self._last_end_s = result.ended_s
        self._durations.setdefault(step.size, deque(maxlen=_REMEMBERED)).append(result.ended_s - result.started_s)

    def _at_least_s(self, size: int) -> float:
        """What a step of a size takes that is no faster than the last ones."""
        known = self._durations.get(size)
        if known is None:
            smaller = max((each for each in self._durations if each < size), default=None)
            known = self._durations[smaller] if smaller is not None else None
        return min(known) if known is not None else -math.inf


class _InFlight(NamedTuple):
    size: int
    launched_s: float
    was_due: bool
    is_beside: bool
    """Another was in flight when it was launched."""


def _size_of(num_tokens: int) -> int:
    """Steps of about as many tokens have the same size."""
    return round(_SIZES_PER_OCTAVE * math.log2(num_tokens))

"""The queue of a device that computes behind the host's back: steps are launched, and settled when it has passed them.

    enqueue   start mark | the step's copies, layers, sampler, copies of its tokens to the host | end mark
    collect   the oldest step: wait for its end mark, read its tokens

All of it goes to one stream, in the order of the plans. So step N + 1 begins the moment step N ends, with N's tokens as
its input, which never leave the device for it (the relay); and it overwrites nothing that N still reads, be it a row of
the table, the relay or a slot. The host needs no more barriers than the one on what it uploads (`upload`).

A step whose masks follow from the tokens of the steps before it (grammars) has its layers launched first and then waits
for those tokens, while the device computes the layers: the one case in which `enqueue` waits.

A step that cannot be launched (out of memory, as a rule) is a result like any other and stays in its place. What marks
raise is the device itself, and the end of the runner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from radixfleet.clock import Clock
from worker.core.step import StepPlan, StepResult
from worker.runner.memory_errors import release_cached
from worker.runner.step_results import Failure, failure_of, result_of
from worker.runner.step_sampler import Drawn, Sampled

_LEAST_WAIT_S = 100e-6
"""How often a step that is about to end is asked whether it has."""


class Mark(Protocol):
    """A place in the stream."""

    def is_past(self) -> bool:
        """Whether the device has passed the place. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until the device has passed it."""
        ...

    def passed_s(self) -> float:
        """When the device passed it, by the clock that processes share. Asked once it is past, in stream order."""
        ...


class Computer(Protocol):
    """What the queue asks of a `StepComputer`."""

    device: torch.device
    in_sampling: bool

    def launch(self, plan: StepPlan, settle_before: Callable[[], None] | None = None) -> Drawn:
        """Have a step computed behind what is launched already."""
        ...

    def settle(self, drawn: Drawn) -> Sampled:
        """The tokens of a step that the device has passed."""
        ...


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    start: Mark
    end: Mark
    launched_s: float
    outcome: Drawn | Sampled | Failure
    """Drawn until it settles."""
    ready_s: float
    """When it was launched whole, or as far as it goes without the tokens of those before it."""


class DeviceQueue:
    """Implements `worker.runner.protocol.StepQueue`. Used from one thread."""

    def __init__(self, computer: Computer, mark: Callable[[], Mark], clock: Clock) -> None:
        """`mark` places a mark behind all that is launched."""
        self._computer = computer
        self._mark = mark
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._last_end_s = clock.now()
        self._last_duration_s = 0.0
        self._waits_since_s: float | None = None
        """When the step that is being launched began to wait for the tokens of those before it, if it did."""

    def enqueue(self, plan: StepPlan) -> None:
        """See `StepQueue.enqueue`."""
        start, launched_s = self._mark(), self._clock.now()
        self._waits_since_s = None
        outcome = self._launch(plan)
        ready_s = self._clock.now() if self._waits_since_s is None else self._waits_since_s
        if isinstance(outcome, Failure) and outcome.shortage is not None:
            release_cached(self._computer.device)  # here, where the failure, and with it the step's tensors, is gone
        self._steps.append(_Step(plan, start, self._mark(), launched_s, outcome, ready_s))

    def _launch(self, plan: StepPlan) -> Drawn | Failure:
        try:
            return self._computer.launch(plan, self._settle_all if self._steps else None)
        except Exception as error:  # noqa: BLE001 - whatever a step ran into, the next one may succeed
            return failure_of(plan, error, self._computer.device, in_sampling=self._computer.in_sampling)

    def time_left_s(self) -> float:
        """See `StepQueue.time_left_s`. Half of what the last step makes one expect, so as not to be late."""
        oldest = self._steps[0]
        if oldest.end.is_past():
            return 0.0
        expected_end_s = max(oldest.launched_s, self._last_end_s) + self._last_duration_s
        return max((expected_end_s - self._clock.now()) / 2, _LEAST_WAIT_S)

    def collect(self) -> StepResult:
        """See `StepQueue.collect`."""
        step = self._steps.popleft()
        outcome = self._settled(step)
        started_s = step.start.passed_s()
        ended_s = max(started_s, step.end.passed_s())
        self._last_end_s, self._last_duration_s = ended_s, ended_s - started_s
        return result_of(step.plan, outcome, started_s, ended_s, step.ready_s)

    def _settle_all(self) -> None:
        self._waits_since_s = self._clock.now()
        for step in self._steps:
            self._settled(step)

    def _settled(self, step: _Step) -> Sampled | Failure:
        step.end.wait()
        if isinstance(step.outcome, Drawn):
            step.outcome = self._computer.settle(step.outcome)
        return step.outcome

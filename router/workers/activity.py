"""What the workers did lately: readings of their totals, kept for as long as a console looks back.

    worker --StateUpdate.totals--> heard        (the newest word, not looked at)
    lease  --started--> prompt tokens counted
    once a second, `FleetActivity.tick`: what was heard is taken in, by how much it grew is added to the worker's sums
    and the fleet's, and every two seconds the sums are marked

All sums only grow, over restarts of engines and removals of workers, so any two marks have a difference that means
something. Memory: `_WORKER_MARKS` readings a worker, `_FLEET_MARKS` for the fleet. On the event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import add
from typing import Protocol

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.clock import Clock
from radixfleet.rates import PromptTokens, Recent, Totals, increase, joined, prompt_increase, prompts_joined

TICK_S = 1.0
WINDOWS_S = (10.0, 60.0)
"""How far back `recent` looks."""
_MARK_S = 2.0
_SLACK_S = 0.1
"""A tick that comes a little early still makes its mark."""
_AT_A_TIME = 32
"""Workers; one takes about 0.05 ms."""
_WORKER_MARKS = 31
_FLEET_MARKS = 301
_NOTHING_ASKED = (0,) * len(fields(PromptTokens))


@dataclass(frozen=True, slots=True)
class Mark:
    """The sums at one moment."""

    at_s: float
    totals: Totals
    prompt_tokens: PromptTokens


class Activity:
    """The sums of one worker, or of the fleet, and marks of them."""

    def __init__(self, clock: Clock, *, marks: int = _WORKER_MARKS) -> None:
        self._clock = clock
        self._totals = Totals()
        self._prompts = PromptTokens()
        self._marks: deque[Mark] = deque([self._mark()], maxlen=marks)

    def add(self, totals: Totals, prompts: PromptTokens) -> None:
        """So much more was done."""
        self._totals = joined(self._totals, totals)
        self._prompts = prompts_joined(self._prompts, prompts)

    def mark(self) -> None:
        """Remember the sums of now, unless it is too soon for it."""
        now = self._mark()
        if now.at_s - self._marks[-1].at_s >= _MARK_S - _SLACK_S:
            self._marks.append(now)

    def recent(self) -> tuple[Recent, ...]:
        """By how much the sums grew, for each of WINDOWS_S, or since the beginning when that is less long ago."""
        now = self._mark()
        return tuple(_between(self._before(now.at_s - window_s), now) for window_s in WINDOWS_S)

    def steps(self) -> list[tuple[float, Recent]]:
        """What happened between each two marks, the oldest first, with the time of the second."""
        marks = list(self._marks)
        return [(now.at_s, _between(before, now)) for before, now in pairwise(marks)]

    def _mark(self) -> Mark:
        return Mark(self._clock.now(), self._totals, self._prompts)

    def _before(self, at_s: float) -> Mark:
        """The newest mark that is at least so old; the oldest when none is."""
        return next((mark for mark in reversed(self._marks) if mark.at_s <= at_s), self._marks[0])


class WorkerActivity(Activity):
    """The activity of one worker: its newest report, and the prompts that this router sent to it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._heard: Callable[[], Totals] | None = None
        self._last: Totals | None = None
        self._asked = _NOTHING_ASKED
        """Since the last `take`, as in PromptTokens: making one takes 2 us, and this is said of every request."""

    def heard(self, read: Callable[[], Totals]) -> None:
        """The worker's totals came; `read` makes them out of the wire's form when they are wanted.

        The first word of a worker is where counting begins.
        """
        if self._last is None:
            self._last = read()
        else:
            self._heard = read

    def restarted(self) -> None:
        """The worker's engine is a new one, and counts from 0. Call it before the new one's totals are heard."""
        self._heard = None
        self._last = Totals()

    def started(self, prompt_tokens: int, reachable: int, predicted: int, actual: int) -> None:
        """A request began there, of which the worker found `actual` tokens in its cache."""
        asked = prompt_tokens, reachable, predicted, actual, _missed(predicted, actual)
        self._asked = tuple(map(add, self._asked, asked))

    def take(self) -> tuple[Totals, PromptTokens]:
        """What is new since the last call."""
        grown = Totals()
        if self._heard is not None and self._last is not None:
            now = self._heard()
            grown = increase(now, self._last)
            self._heard, self._last = None, now
        asked, self._asked = PromptTokens(*self._asked), _NOTHING_ASKED
        return grown, asked


class Active(Protocol):
    """A worker, as the fleet's activity sees it."""

    @property
    def activity(self) -> WorkerActivity:
        """The worker's own activity."""
        ...


class FleetActivity:
    """The sums of all workers together."""

    def __init__(self, workers: Callable[[], Iterable[Active]], clock: Clock) -> None:
        self._workers = workers
        self._clock = clock
        self._began_s = clock.now()
        self._fleet = Activity(clock, marks=_FLEET_MARKS)

    @property
    def uptime_s(self) -> float:
        """Since this was made."""
        return self._clock.now() - self._began_s

    def recent(self) -> tuple[Recent, ...]:
        """By how much the sums of all workers grew lately."""
        return self._fleet.recent()

    def steps(self) -> Sequence[tuple[float, Recent]]:
        """What happened every two seconds of the last ten minutes."""
        return self._fleet.steps()

    def tick(self) -> None:
        """Take in what was heard."""
        for _ in self._takes():
            pass

    async def run(self) -> None:
        """Tick until cancelled. Of a large fleet a few workers at a time, so that no request waits for the rest."""
        while True:
            for number, _ in enumerate(self._takes(), 1):
                if number % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(TICK_S)

    def _takes(self) -> Iterator[None]:
        """Take in what was heard of one worker after the other, and mark it all at the end."""
        for worker in tuple(self._workers()):
            grown, asked = worker.activity.take()
            worker.activity.add(grown, asked)
            worker.activity.mark()
            self._fleet.add(grown, asked)
            yield
        self._fleet.mark()


def _missed(predicted: int, actual: int) -> int:
    """By how many tokens a prediction was wrong, in whole routing blocks on both sides.

    What a worker has beyond its last whole block, or must compute again of the prompt's last page, no router predicts.
    """
    return abs(predicted // BLOCK_TOKENS - actual // BLOCK_TOKENS) * BLOCK_TOKENS


def _between(before: Mark, now: Mark) -> Recent:
    return Recent(
        seconds=now.at_s - before.at_s,
        totals=increase(now.totals, before.totals),
        prompt_tokens=prompt_increase(now.prompt_tokens, before.prompt_tokens),
    )

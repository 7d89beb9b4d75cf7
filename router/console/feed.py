"""What the console's page asks for once a second: the rows of the fleet, its history, its hottest prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixfleet import heard
from radixfleet.clock import Clock
from radixfleet.overview import FleetRow, WorkerRow, fleet_row, worker_row
from radixfleet.rates import Recent
from router.api.report import Reporter, worker_entry
from router.index import HotPrefix, HotPrefixes, Sketch
from router.workers.activity import FleetActivity
from router.workers.registry import WorkerRegistry

_FRESH_S = 0.5
"""Pages that ask within this time get the same rows."""
_AT_A_TIME = 16
"""Workers; the row of one takes about 0.3 ms, and requests must not wait for those of a thousand."""
_HOTTEST = 12

Beginning = Callable[[HotPrefix], str]
"""How a prefix begins, in words; "" where that is not to be told."""


@dataclass(frozen=True, slots=True)
class Point:
    """What the fleet did in a stretch of about two seconds that ended at `at_s`, by the router's clock."""

    at_s: float
    seconds: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    asked: int
    reachable: int


@dataclass(frozen=True, slots=True)
class Hot:
    """One of the prefixes that saved most in the last five to ten minutes."""

    prefix: str
    """The hash of its last block, in hexadecimal."""
    tokens: int
    saved_tokens: int
    error_tokens: int
    requests: int
    workers: tuple[str, ...]
    """That hold it now, as far as the router knows."""
    text: str
    """How it begins; "" where that is not told."""


@dataclass(frozen=True, slots=True)
class Feed:
    """One answer."""

    now_s: float
    """The router's clock."""
    fleet: FleetRow
    workers: Sequence[WorkerRow]
    trends: Sequence[Sequence[float]]
    """Tokens/s of each worker in the last minute, every two seconds, in the order of `workers`."""
    hottest: Sequence[Hot]
    points: Sequence[Point]
    """Those after the moment that was asked for, the oldest first."""


class Feeder:
    """Makes them. On the event loop only."""

    def __init__(
        self,
        registry: WorkerRegistry,
        reporter: Reporter,
        activity: FleetActivity,
        sketch: Sketch,
        hot_prefixes: HotPrefixes,
        beginning: Beginning,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._reporter = reporter
        self._activity = activity
        self._sketch = sketch
        self._hot_prefixes = hot_prefixes
        self._beginning = beginning
        self._clock = clock
        self._last: Feed | None = None
        self._making = asyncio.Lock()

    async def feed(self, since_s: float) -> Feed:
        """What there is, with the points after `since_s`."""
        async with self._making:
            last, now_s = self._last, self._clock.now()
            if last is None or now_s - last.now_s > _FRESH_S:
                last = self._last = await self._made(now_s)
        points = [point for point in last.points if point.at_s > since_s]
        return Feed(last.now_s, last.fleet, last.workers, last.trends, last.hottest, points)

    async def _made(self, now_s: float) -> Feed:
        rows: list[tuple[WorkerRow, list[float]]] = []
        for number, worker in enumerate(self._registry.workers, 1):
            row = worker_row(heard.worker_entry(worker_entry(worker)))
            rows.append((row, _speeds(worker.activity.steps())))
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)
        rows.sort(key=lambda each: each[0].worker)
        workers = [row for row, _ in rows]
        return Feed(
            now_s=now_s,
            fleet=fleet_row(heard.fleet_state(self._reporter.fleet_state()), workers),
            workers=workers,
            trends=[speeds for _, speeds in rows],
            hottest=[self._hot(prefix) for prefix in self._hot_prefixes.hottest(_HOTTEST)],
            points=[_point(at_s, recent) for at_s, recent in self._activity.steps()],
        )

    def _hot(self, prefix: HotPrefix) -> Hot:
        names = {worker.slot: worker.name for worker in self._registry.workers}
        holders = sorted(names[slot] for slot in self._sketch.holders(prefix.block_hash) if slot in names)
        return Hot(
            prefix=f"{prefix.block_hash:016x}",
            tokens=prefix.tokens,
            saved_tokens=prefix.saved_tokens,
            error_tokens=prefix.error_tokens,
            requests=prefix.requests,
            workers=tuple(holders),
            text=self._beginning(prefix),
        )


def _point(at_s: float, recent: Recent) -> Point:
    totals, prompts = recent.totals, recent.prompt_tokens
    return Point(
        round(at_s, 2),
        round(recent.seconds, 3),
        totals.generated_tokens,
        totals.prompt_tokens,
        totals.cached_tokens,
        prompts.asked,
        prompts.reachable,
    )


def _speeds(steps: Sequence[tuple[float, Recent]]) -> list[float]:
    return [round(recent.totals.generated_tokens / max(recent.seconds, 1e-3), 1) for _, recent in steps]

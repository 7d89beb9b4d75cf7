"""How many workers a model shall have, from its load over time. Pure: time and load come in, a count goes out.

    up    requests have waited, or KV memory was short, for all of `up_after_s`: as many more as the waiting ones need,
          by what each worker carries now, but at most twice as many as there are
    down  in all of `down_after_s` one worker less would have stayed below SPARE of places and KV memory: one less
    else  as it is

Waiting is the sign of a full fleet, not a high number of running requests: batches are meant to be full. After a change
of the count the times begin anew, so that new workers are given the time to show what they do; workers that are still
loading count as there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SPARE = 0.6
"""A fleet that would be fuller than this with one worker less keeps it. Far below what asks for more."""
KV_SHORT = 0.9
"""Share of the KV pool in use (and not just cached) from which on memory is short."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One serving worker."""

    running_requests: int
    waiting_requests: int
    max_running_requests: int
    kv_used: float
    """Share of the KV pool that running requests hold."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows and how patient scaling is."""

    min: int
    max: int
    up_after_s: float
    down_after_s: float


@dataclass(slots=True)
class Scaling:
    """Of one model. Call `decide` with every new sight of its load."""

    count: int
    """Workers wanted now."""
    _short_since_s: float | None = field(default=None, init=False)
    _idle_since_s: float | None = field(default=None, init=False)

    def decide(self, now_s: float, limits: Limits, queued: int, workers: Sequence[WorkerLoad]) -> int:
        """The new count. `queued`: requests that wait in routers. `workers`: those that serve."""
        count = min(max(self.count, limits.min), limits.max)
        if count == self.count and workers:
            count = self._by_load(now_s, limits, queued, workers)
        if count != self.count:
            self.count = count
            self._short_since_s = self._idle_since_s = None
        return count

    def _by_load(self, now_s: float, limits: Limits, queued: int, workers: Sequence[WorkerLoad]) -> int:
        self._short_since_s = _since(self._short_since_s, now_s, holds=is_short(queued, workers))
        self._idle_since_s = _since(self._idle_since_s, now_s, holds=has_spare(queued, workers))
        if self._short_since_s is not None and now_s - self._short_since_s >= limits.up_after_s:
            return min(limits.max, max(self.count, needed(queued, workers)))
        if self._idle_since_s is not None and now_s - self._idle_since_s >= limits.down_after_s:
            return max(limits.min, self.count - 1)
        return self.count


def is_short(queued: int, workers: Sequence[WorkerLoad]) -> bool:
    """Requests wait for a worker, or every worker's memory is nearly full."""
    waiting = queued + sum(worker.waiting_requests for worker in workers)
    return waiting > 0 or min(worker.kv_used for worker in workers) >= KV_SHORT


def has_spare(queued: int, workers: Sequence[WorkerLoad]) -> bool:
    """One worker less would do."""
    num_left = len(workers) - 1
    if queued or any(worker.waiting_requests for worker in workers):
        return False
    if num_left == 0:
        return not any(worker.running_requests for worker in workers)
    places = sum(worker.max_running_requests for worker in workers) / len(workers) * num_left
    running = sum(worker.running_requests for worker in workers)
    kv_used = sum(worker.kv_used for worker in workers) / num_left
    return running <= SPARE * places and kv_used <= SPARE


def needed(queued: int, workers: Sequence[WorkerLoad]) -> int:
    """Workers with which nothing would wait, if each carried what one carries now; at least one more, at most twice."""
    running = sum(worker.running_requests for worker in workers)
    waiting = queued + sum(worker.waiting_requests for worker in workers)
    per_worker = max(1.0, running / len(workers))
    return min(2 * len(workers), max(len(workers) + 1, math.ceil((running + waiting) / per_worker)))


def _since(since_s: float | None, now_s: float, *, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s

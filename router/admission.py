"""Requests that wait for a place on a worker: who is next, and who is refused. Pure: no event loop, no worker.

    order   by priority, the highest first; within a priority, the longest wait first
    full    a newcomer takes the place of the last in the order when its own priority is higher; else it is refused
    leaving at its turn, or any time when its client or its deadline ends it

One queue for the requests of one model; the router's event loop owns it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Generic, TypeAlias, TypeVar

from radixfleet.clock import Clock

_RATE_SAMPLES = 64
_UNKNOWN_RETRY_S = 1.0
_SHORTEST_RETRY_S = 0.05
_LONGEST_RETRY_S = 60.0

Place: TypeAlias = tuple[int, int]
"""(-priority, number of arrival): the lowest is next."""

Item = TypeVar("Item")


class QueueFull(Exception):
    """Every place is taken by requests that go before this one."""


class AdmissionQueue(Generic[Item]):
    """See the module."""

    def __init__(self, max_waiting: int, clock: Clock) -> None:
        """`max_waiting`: places, at least 1."""
        self._max_waiting = max_waiting
        self._clock = clock
        self._order: list[Place] = []
        self._items: dict[Place, Item] = {}
        self._arrivals = 0
        self._taken_at_s: deque[float] = deque(maxlen=_RATE_SAMPLES)

    def __len__(self) -> int:
        return len(self._order)

    def add(self, item: Item, priority: int) -> tuple[Place, Item | None]:
        """Queue `item`. Returns its place, and who had to leave for it. Raises QueueFull."""
        displaced = None
        if len(self._order) >= self._max_waiting:
            if -priority >= self._order[-1][0]:
                raise QueueFull
            displaced = self._items.pop(self._order.pop())
        if not self._order:
            self._taken_at_s.clear()  # how fast the queue went before it was empty says nothing of now
        self._arrivals += 1
        place = (-priority, self._arrivals)
        insort(self._order, place)
        self._items[place] = item
        return place, displaced

    @property
    def next(self) -> Item | None:
        """The request whose turn it is; None when none waits."""
        return self._items[self._order[0]] if self._order else None

    def take(self) -> Item:
        """Let `next` go on. There must be one."""
        self._taken_at_s.append(self._clock.now())
        return self._items.pop(self._order.pop(0))

    def remove(self, place: Place) -> bool:
        """Let go of one that waits no longer; False when it has left already."""
        if self._items.pop(place, None) is None:
            return False
        del self._order[bisect_left(self._order, place)]
        return True

    @property
    def retry_after_s(self) -> float:
        """When a refused request may find a place: the time in which as many as wait now have gone on lately."""
        if len(self._taken_at_s) < 2:
            return _UNKNOWN_RETRY_S
        # Up to now and not to the last one taken: a queue that has come to a stop is slow.
        span_s = self._clock.now() - self._taken_at_s[0]
        estimate_s = len(self._order) * span_s / (len(self._taken_at_s) - 1)
        return min(max(estimate_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)

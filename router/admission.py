"""Requests that wait for a place on a worker: who is next, and who is refused. Pure: no event loop, no worker.

    order   by priority, the highest first; within a priority, the longest wait first
    full    a newcomer has its turn first; where it must wait and too many do, the last in the order leaves, be it the
            newcomer itself or one of lower priority
    leaving at its turn, or any time when its client or its deadline ends it
    lanes   requests that the same workers could take wait in one lane; where the first of a lane must go on waiting, so
            must all behind it, and the turn is another lane's. Which lane is whose changes with the workers

One queue for the requests of one model; the router's event loop owns it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from radixfleet.clock import Clock

_RATE_SAMPLES = 64
_UNKNOWN_RETRY_S = 1.0
_SHORTEST_RETRY_S = 0.05
_LONGEST_RETRY_S = 60.0


class Place(NamedTuple):
    """Where one waits. The lowest is next."""

    rank: int
    """Minus the priority."""
    arrival: int
    """No two have the same."""


Item = TypeVar("Item")


class AdmissionQueue(Generic[Item]):
    """See the module."""

    def __init__(self, max_waiting: int, clock: Clock, lane_of: Callable[[Item], Hashable]) -> None:
        """`max_waiting`: how many may, at least 1. `lane_of`: asked when one comes, and in `sort`."""
        self._max_waiting = max_waiting
        self._clock = clock
        self._lane_of = lane_of
        self._order: list[Place] = []
        self._waiting: dict[Place, tuple[Item, Hashable]] = {}
        """Who waits there, and its lane."""
        self._lanes: dict[Hashable, list[Place]] = {}
        """The order of each lane in which someone waits."""
        self._arrivals = 0
        self._taken_at_s: deque[float] = deque(maxlen=_RATE_SAMPLES)

    def __len__(self) -> int:
        return len(self._order)

    def add(self, item: Item, priority: int) -> Place:
        """Queue `item`. Call `displace` when it has had its turn."""
        if not self._order:
            self._taken_at_s.clear()  # how fast the queue went before it was empty says nothing of now
        self._arrivals += 1
        place = Place(-priority, self._arrivals)
        lane = self._lane_of(item)
        insort(self._order, place)
        insort(self._lanes.setdefault(lane, []), place)
        self._waiting[place] = item, lane
        return place

    def displace(self) -> Item | None:
        """Who has left because one too many waits: the last in the order. None: there is a place for all."""
        if len(self._order) <= self._max_waiting:
            return None
        last = self._order[-1]
        item, _ = self._waiting[last]
        self.remove(last)
        return item

    def sort(self) -> None:
        """Find the lanes anew."""
        self._lanes.clear()
        for place in self._order:
            item, _ = self._waiting[place]
            lane = self._lane_of(item)
            self._waiting[place] = item, lane
            self._lanes.setdefault(lane, []).append(place)

    def next(self, passed: Collection[Hashable] = ()) -> tuple[Place, Item, Hashable] | None:
        """Whose turn it is when those of the lanes `passed` must go on waiting, and the lane; None: no other waits."""
        first = min((order[0] for lane, order in self._lanes.items() if lane not in passed), default=None)
        return None if first is None else (first, *self._waiting[first])

    def take(self, place: Place) -> None:
        """Let the one that waits there go on."""
        self._taken_at_s.append(self._clock.now())
        self.remove(place)

    def remove(self, place: Place) -> bool:
        """Let go of one that waits no longer; False when it has left already."""
        waiting = self._waiting.pop(place, None)
        if waiting is None:
            return False
        del self._order[bisect_left(self._order, place)]
        _, lane = waiting
        order = self._lanes[lane]
        del order[bisect_left(order, place)]
        if not order:
            del self._lanes[lane]
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

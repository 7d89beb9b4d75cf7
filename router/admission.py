"""Requests that wait for a place on a worker: who is next, and who is refused. Pure: no event loop, no worker.

    order   by priority, the highest first; within a priority, the longest wait first
    full    a newcomer takes the place of the last in the order when its own priority is higher; else it is refused
    leaving at its turn, or any time when its client or its deadline ends it
    lanes   requests that the same workers could take wait in one lane; where the first of a lane must go on waiting, so
            must all behind it, and the turn is another lane's

One queue for the requests of one model; the router's event loop owns it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from radixfleet.clock import Clock

_RATE_SAMPLES = 64
_UNKNOWN_RETRY_S = 1.0
_SHORTEST_RETRY_S = 0.05
_LONGEST_RETRY_S = 60.0

Lane: TypeAlias = Hashable


class Place(NamedTuple):
    """Where one waits. The lowest is next."""

    rank: int
    """Minus the priority."""
    arrival: int
    """No two have the same, so lanes are never compared."""
    lane: Lane


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
        self._lanes: dict[Lane, list[Place]] = {}
        """The order of each lane in which someone waits."""
        self._arrivals = 0
        self._taken_at_s: deque[float] = deque(maxlen=_RATE_SAMPLES)

    def __len__(self) -> int:
        return len(self._order)

    def add(self, item: Item, priority: int, lane: Lane = None) -> tuple[Place, Item | None]:
        """Queue `item`. Returns its place, and who had to leave for it. Raises QueueFull."""
        displaced = None
        if len(self._order) >= self._max_waiting:
            last = self._order[-1]
            if -priority >= last.rank:
                raise QueueFull
            displaced = self._items[last]
            self.remove(last)
        if not self._order:
            self._taken_at_s.clear()  # how fast the queue went before it was empty says nothing of now
        self._arrivals += 1
        place = Place(-priority, self._arrivals, lane)
        insort(self._order, place)
        insort(self._lanes.setdefault(lane, []), place)
        self._items[place] = item
        return place, displaced

    def holds(self, lane: Lane) -> bool:
        """Whether someone waits in this lane."""
        return lane in self._lanes

    def next(self, passed: Collection[Lane] = ()) -> tuple[Place, Item] | None:
        """The request whose turn it is when those of the lanes `passed` must go on waiting; None: no other waits."""
        first = min((order[0] for lane, order in self._lanes.items() if lane not in passed), default=None)
        return None if first is None else (first, self._items[first])

    def take(self, place: Place) -> None:
        """Let the one that waits there go on."""
        self._taken_at_s.append(self._clock.now())
        self.remove(place)

    def remove(self, place: Place) -> bool:
        """Let go of one that waits no longer; False when it has left already."""
        if self._items.pop(place, None) is None:
            return False
        del self._order[bisect_left(self._order, place)]
        order = self._lanes[place.lane]
        del order[bisect_left(order, place)]
        if not order:
            del self._lanes[place.lane]
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

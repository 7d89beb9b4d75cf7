"""Requests that wait for their first step, or for their next after a retraction, and in which order they are tried.

Retracted requests come first in every order, oldest first: they were admitted once already. Then

    fcfs       the oldest
    priority   the highest priority, then the oldest; with preemption, retracted ones are no exception to this, so that
               none comes back before the one that it had to leave for
    lpm        of the WINDOW oldest, the one with the longest cached prefix. Each admission counts against the older
               ones that it overtook; who was overtaken `max_overtakes` times is tried first. So the wait of a request
               is bounded by the number of requests before it, whatever arrives later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice

from worker.scheduling.limits import Order
from worker.scheduling.request import Request

_Key = tuple[int, int, int]

WINDOW = 32
"""Requests whose cached prefix is looked up in a step, at most."""


class WaitingQueue:
    """Sorted by a key that is fixed while a request waits."""

    def __init__(self, order: Order, max_overtakes: int, *, preempt: bool = False) -> None:
        self._order = order
        self._preempt = preempt
        self._max_overtakes = max_overtakes
        self._keys: list[_Key] = []
        self._requests: dict[_Key, Request] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def first(self) -> Request | None:
        """The one at the head, in the order of the keys."""
        return self._requests[self._keys[0]] if self._keys else None

    def push(self, request: Request) -> None:
        """Put a request in its place."""
        key = self._key(request)
        insort(self._keys, key)
        self._requests[key] = request

    def take(self, request: Request) -> None:
        """Take a request out because it is admitted, which counts against the older ones that it overtakes."""
        if self._order == "lpm":
            for key in self._keys[: bisect_left(self._keys, self._key(request))]:
                self._requests[key].overtaken += 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        key = self._key(request)
        del self._keys[bisect_left(self._keys, key)]
        del self._requests[key]

    def candidates(
        self, cached_tokens: Callable[[Request], int], is_held: Callable[[Request], bool] = lambda _: False
    ) -> list[Request]:
        """Those to try, best first, without those that are held, which so keep nobody out of the window.

        `cached_tokens` looks up how much of a request the cache holds now.
        """
        free = (request for key in self._keys if not is_held(request := self._requests[key]))
        if self._order != "lpm":
            return list(free)
        window = list(islice(free, WINDOW))
        for request in window:
            request.expected_cached = cached_tokens(request)
        return sorted(window, key=self._lpm_rank)

    def _key(self, request: Request) -> _Key:
        is_new = 0 if request.was_admitted else 1
        if self._preempt:
            return (-request.submit.priority, is_new, request.arrival)
        priority = request.submit.priority if self._order == "priority" else 0
        return (is_new, -priority, request.arrival)

    def _lpm_rank(self, request: Request) -> tuple[bool, int]:
        """Ascending; ties keep the order of arrival, as sorting is stable."""
        goes_first = request.was_admitted or request.overtaken >= self._max_overtakes
        return (not goes_first, 0 if goes_first else -request.expected_cached)

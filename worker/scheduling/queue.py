"""Requests that wait for their first step, or for their next after a retraction, and in which order they are tried.

Retracted requests come first in every order, oldest first: they were admitted once already. Then

    fcfs       the oldest
    priority   the highest priority, then the oldest; with preemption, retracted ones are no exception to this, so that
               none comes back before the one that it had to leave for
    lpm        of the WINDOW oldest, the one with the longest cached prefix. Each admission counts against the older
               ones that it overtook; who was overtaken `max_overtakes` times is tried first. So the wait of a request
               is bounded by the number of requests before it, whatever arrives later.

A request that waits for a prefix which another is computing is held: it keeps its place, but is not tried until then.
Nothing here looks at all that wait: a step costs the candidates it asks for, and one look at each of those waited for.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from worker.scheduling.limits import Order
from worker.scheduling.prefill import is_still_held
from worker.scheduling.request import Request

_Key = tuple[int, int, int]

WINDOW = 32
"""Requests whose cached prefix is looked up in a step, at most."""


class WaitingQueue:
    """The requests that wait, sorted by a key that does not change while they do."""

    def __init__(self, order: Order, max_overtakes: int, *, preempt: bool = False) -> None:
        self._order = order
        self._preempt = preempt
        self._max_overtakes = max_overtakes
        self._keys: list[_Key] = []
        """Keys of the requests that are not held, ascending."""
        self._requests: dict[_Key, Request] = {}
        self._held: dict[Request, list[Request]] = {}
        """Requests that are held, by the request whose prefix they wait for."""
        self._held_until: dict[Request, int] = {}
        """For each request that others wait for: positions that must have settled before the first of them goes on."""
        self.prompt_tokens = 0
        """Prompt tokens that the waiting requests have to compute, by what the cache held when it was last asked."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_candidates(self) -> bool:
        """Whether a request waits that is not held."""
        return bool(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def first(self) -> Request | None:
        """The one at the head of those that are not held, in the order of the keys."""
        return self._requests[self._keys[0]] if self._keys else None

    def push(self, request: Request) -> None:
        """Put a request in its place."""
        key = self._key(request)
        insort(self._keys, key)
        self._requests[key] = request
        self.recount(request)

    def recount(self, request: Request) -> None:
        """Count the tokens of a waiting request anew: what the cache has of it, or will have, has changed."""
        tokens = len(request.fill_ids) - request.expected_shared
        self.prompt_tokens += tokens - request.counted_tokens
        request.counted_tokens = tokens

    def take(self, request: Request) -> None:
        """Take a request out because it is admitted, which counts against the older ones that it overtakes."""
        if self._order == "lpm":
            for key in self._keys[: bisect_left(self._keys, self._key(request))]:
                self._requests[key].overtaken += 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        key = self._key(request)
        del self._requests[key]
        self.prompt_tokens -= request.counted_tokens
        request.counted_tokens = 0
        if request.waits_for is None:
            del self._keys[bisect_left(self._keys, key)]
            return
        other, _ = request.waits_for
        self._held[other].remove(request)
        if not self._held[other]:
            del self._held[other], self._held_until[other]

    def hold(self, request: Request) -> None:
        """Hold a request until the prefix that its `waits_for` names is computed."""
        assert request.waits_for is not None, "nobody to wait for"
        del self._keys[bisect_left(self._keys, self._key(request))]
        self._hold(request, *request.waits_for)
        self.recount(request)

    def let_go(self) -> None:
        """Put back in their places those that are held and have no more to wait for."""
        due = [other for other, until in self._held_until.items() if other.settled >= until or not other.is_seated]
        for other in due:
            del self._held_until[other]
            for request in self._held.pop(other):
                if is_still_held(request) and request.waits_for is not None:
                    self._hold(request, *request.waits_for)
                else:
                    insort(self._keys, self._key(request))
                    self.recount(request)

    def candidates(self, most: int, look_up: Callable[[Request], object]) -> list[Request]:
        """Those to try, best first: at most `most`, none that is held.

        `look_up` is asked for those whose order depends on it: their `expected_cached` is then what the cache has now.
        """
        free = [self._requests[key] for key in self._keys[: WINDOW if self._order == "lpm" else most]]
        if self._order == "lpm":
            for request in free:
                look_up(request)
            free.sort(key=self._lpm_rank)
        return free

    def _hold(self, request: Request, other: Request, until: int) -> None:
        self._held.setdefault(other, []).append(request)
        self._held_until[other] = min(until, self._held_until.get(other, until))

    def _key(self, request: Request) -> _Key:
        is_new = 0 if request.was_admitted else 1
        if self._preempt:
            return (-request.submit.priority, is_new, request.arrival)
        priority = request.submit.priority if self._order == "priority" else 0
        return (is_new, -priority, request.arrival)

    def _lpm_rank(self, request: Request) -> float:
        """Ascending; ties keep the order of arrival, as sorting is stable."""
        goes_first = request.was_admitted or request.overtaken >= self._max_overtakes
        return -math.inf if goes_first else -request.expected_cached

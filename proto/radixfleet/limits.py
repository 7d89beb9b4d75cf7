"""How much one client may ask for: requests a second, by a token bucket, and requests open at once.

Pure: the clock is passed in, and nothing waits. A client is known by its key's name, or by its host where there are no
keys. What is kept of a client is forgotten once its bucket is full again and nothing of it is open.

The bucket holds `burst` requests and gains `rate_per_s` of them each second; a request takes one, or is refused with
the time after which there will be one. A request that comes to several is let in as one, and leaves the bucket in debt:
of what `_MOST_DEBT_S` brings at most, or else a slip would shut its client out for hours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from radixfleet.clock import Clock
from radixfleet.counts import counted
from radixfleet.errors import InvalidRequest, Overloaded

_OPEN_RETRY_S = 1.0
"""When a stream of the client will end is not known."""
_SWEEP_EVERY = 1024
"""Requests between two searches for clients to forget."""
_MOST_DEBT_S = 60.0
"""One request comes to no more than the rate allows in so long."""


@dataclass(slots=True)
class TokenBucket:
    """Allows `rate_per_s` in the long run and `burst` at once."""

    rate_per_s: float
    burst: float
    level: float
    """Below 0: it is in debt."""
    at_s: float

    def wait_s(self, now_s: float) -> float:
        """Seconds until a request may be taken; 0 when it may be now."""
        self._fill(now_s)
        # A part in a billion: what rounding takes away must not cost a whole wait.
        return 0.0 if self.level >= 1.0 - 1e-9 else (1.0 - self.level) / self.rate_per_s

    def take(self, now_s: float, count: int = 1) -> None:
        """Take one request, which `wait_s` allowed, or several that came with it."""
        self._fill(now_s)
        self.level -= count

    def is_full(self, now_s: float) -> bool:
        """Whether the bucket remembers nothing."""
        self._fill(now_s)
        return self.level >= self.burst

    def _fill(self, now_s: float) -> None:
        self.level = min(self.burst, self.level + max(0.0, now_s - self.at_s) * self.rate_per_s)
        self.at_s = max(self.at_s, now_s)


@dataclass(slots=True)
class _Client:
    bucket: TokenBucket | None
    num_open: int = 0


class ClientLimits:
    """The limits of every client. Used on one event loop."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_requests_per_s: float | None = None,
        max_open_requests: int | None = None,
    ) -> None:
        """None: no limit. The bucket holds two seconds' worth, and at least one request."""
        self._clock = clock
        self._rate_per_s = max_requests_per_s
        self._max_open = max_open_requests
        self._clients: dict[str, _Client] = {}
        self._until_sweep = _SWEEP_EVERY

    def __len__(self) -> int:
        """Clients that are remembered."""
        return len(self._clients)

    @contextmanager
    def visit(self, client: str) -> Iterator[None]:
        """One request of `client`, for as long as the block lasts. Raises Overloaded, which counts nothing."""
        if self._rate_per_s is None and self._max_open is None:
            yield
            return
        state = self._enter(client)
        try:
            yield
        finally:
            state.num_open -= 1

    @contextmanager
    def visit_more(self, client: str, count: int) -> Iterator[None]:
        """So many more requests, which came in one that is visiting.

        Raises Overloaded, after which the one alone has counted, and InvalidRequest where so many at once never may be.
        """
        if self._rate_per_s is None and self._max_open is None:
            yield
            return
        state, total = self._clients[client], count + 1
        if self._max_open is not None:
            if total > self._max_open:
                raise InvalidRequest(
                    f"this counts as {total} requests, and at most {self._max_open} of a client may run at once"
                )
            if state.num_open + count > self._max_open:
                raise self._too_many(state.num_open - 1, f", this one counts as {total}")
        if self._rate_per_s is not None and total > (most := max(1, int(_MOST_DEBT_S * self._rate_per_s))):
            raise InvalidRequest(
                f"this counts as {total} requests, and at {self._rate_per_s:g} requests a second one may come to {most}"
            )
        if state.bucket is not None:
            state.bucket.take(self._clock.now(), count)
        state.num_open += count
        try:
            yield
        finally:
            state.num_open -= count

    def _enter(self, client: str) -> _Client:
        now_s = self._clock.now()
        self._sweep(now_s)
        state = self._clients.get(client)
        if state is None:
            state = self._clients[client] = _Client(self._new_bucket(now_s))
        if self._max_open is not None and state.num_open >= self._max_open:
            raise self._too_many(state.num_open)
        if state.bucket is not None:
            wait_s = state.bucket.wait_s(now_s)
            if wait_s > 0:
                raise Overloaded(
                    f"this client may send {self._rate_per_s:g} requests a second: try again in {math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                    limit="requests_per_s",
                    max=f"{self._rate_per_s:g}",
                )
            state.bucket.take(now_s)
        state.num_open += 1
        return state

    def _too_many(self, running: int, more: str = "") -> Overloaded:
        return Overloaded(
            f"{counted(running, 'request')} of this client {'is' if running == 1 else 'are'} running{more}, "
            f"and at most {self._max_open} may run at once",
            retry_after_s=_OPEN_RETRY_S,
            limit="open_requests",
            max=str(self._max_open),
        )

    def _new_bucket(self, now_s: float) -> TokenBucket | None:
        if self._rate_per_s is None:
            return None
        burst = max(1.0, 2 * self._rate_per_s)
        return TokenBucket(self._rate_per_s, burst, burst, now_s)

    def _sweep(self, now_s: float) -> None:
        self._until_sweep -= 1
        if self._until_sweep > 0:
            return
        self._until_sweep = _SWEEP_EVERY
        self._clients = {
            name: client
            for name, client in self._clients.items()
            if client.num_open or (client.bucket is not None and not client.bucket.is_full(now_s))
        }

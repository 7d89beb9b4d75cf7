"""Leases of `Fleet.Route`: the client streams from the worker itself, and the worker reports how the request goes on.

    held --(worker: STARTED)--> started --(FIRST_TOKEN)--> --(ENDED)--> settled
      |                            |
      +-- lease_s passed           +-- the worker restarted, was removed, or its reports were interrupted
      +-- its client's stream broke

A client that has a stream (`Fleet.RouteStream`) may end its leases itself, at any time.

A lease that was interrupted is given up, not the request: its load is then part of what the worker reports, as is that
of a client that comes with a lease after it expired.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from router.dispatch.lease import Lease, Verdict
from router.metrics import LEASE_OUTCOMES, RouterMetrics
from router.workers.listener import LeasePhase
from router.workers.state import WorkerState

Owner: TypeAlias = set[str]
"""The ids of a stream's open leases, kept by `LookAside`."""

_ID_BYTES = 12
_IDS_AT_ONCE = 64


@dataclass(slots=True)
class _Held:
    lease: Lease
    owner: Owner | None


class LookAside:
    """All open leases of look-aside requests. A `LeaseListener`."""

    def __init__(self, lease_s: float, metrics: RouterMetrics) -> None:
        self.lease_s = lease_s
        """How long a lease lasts unless the worker says that its request started."""
        self._held: dict[str, _Held] = {}
        self._ids = _lease_ids()
        self._unstarted: dict[str, float] = {}
        """When those expire of which no worker has spoken: the first one next, for all last equally long."""
        self._timer: asyncio.TimerHandle | None = None
        """One for all of them: a timer for each would cost more than all else that is kept of a lease."""
        self._outcomes = {outcome: metrics.leases.labels(outcome) for outcome in LEASE_OUTCOMES}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, lease: Lease, owner: Owner | None = None) -> str:
        """Keep `lease` until the worker or its client tells its end, or it expires. Returns its id.

        `owner`: of the stream on which it was booked.
        """
        lease_id = next(self._ids)
        loop = asyncio.get_running_loop()
        self._held[lease_id] = _Held(lease, owner)
        self._unstarted[lease_id] = loop.time() + self.lease_s
        if self._timer is None:
            self._timer = loop.call_later(self.lease_s, self._expire)
        if owner is not None:
            owner.add(lease_id)
        return lease_id

    def end(self, lease_id: str, cached_tokens: int | None) -> None:
        """The client says that the request ended, which found so many tokens cached; None: that it is never sent.

        The lease must be open.
        """
        if cached_tokens is None:
            self._end(lease_id, "released")
            return
        lease = self._held[lease_id].lease
        lease.started(min(cached_tokens, lease.request.prompt_tokens))
        self._end(lease_id, "ended", Verdict.ANSWERED)

    def leave(self, owner: Owner) -> None:
        """The owner's client is gone. Requests that it has sent break off, as their workers will tell."""
        for lease_id in tuple(owner):
            if not self._held[lease_id].lease.is_started:
                self._end(lease_id, "released")

    def close(self) -> None:
        """Settle all."""
        for lease_id in tuple(self._held):
            self._end(lease_id, "closed")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lease_event(self, worker: WorkerState, lease_id: str, phase: LeasePhase, cached_tokens: int) -> None:
        """See `LeaseListener`. A worker speaks for its own leases alone."""
        held = self._held.get(lease_id)
        if held is None or held.lease.worker is not worker:
            return
        if phase is LeasePhase.ENDED:
            self._end(lease_id, "ended", Verdict.ANSWERED)
            return
        self._unstarted.pop(lease_id, None)
        if phase is LeasePhase.STARTED:
            held.lease.started(cached_tokens)
        else:
            held.lease.first_token()

    def events_lost(self, worker: WorkerState) -> None:
        """See `LeaseListener`. Leases that have not started go on: they expire by themselves."""
        for lease_id, held in tuple(self._held.items()):
            if held.lease.worker is worker and held.lease.is_started:
                self._end(lease_id, "interrupted")

    def worker_gone(self, worker: WorkerState) -> None:
        """See `LeaseListener`."""
        for lease_id, held in tuple(self._held.items()):
            if held.lease.worker is worker:
                self._end(lease_id, "interrupted")

    def _end(self, lease_id: str, outcome: str, verdict: Verdict = Verdict.UNKNOWN) -> None:
        held = self._held.pop(lease_id)
        self._unstarted.pop(lease_id, None)
        if held.owner is not None:
            held.owner.discard(lease_id)
        held.lease.settle(verdict)
        self._outcomes[outcome].inc()

    def _expire(self) -> None:
        """End what is due, and come again when the next one is."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._unstarted:
            lease_id, ends_at_s = next(iter(self._unstarted.items()))
            if ends_at_s > loop.time():
                self._timer = loop.call_at(ends_at_s, self._expire)
                return
            self._end(lease_id, "expired")


def _lease_ids() -> Iterator[str]:
    """Nobody guesses them. The system is asked for many at once, for asking takes longer than drawing."""
    while True:
        drawn = secrets.token_bytes(_ID_BYTES * _IDS_AT_ONCE)
        for begin in range(0, len(drawn), _ID_BYTES):
            yield drawn[begin : begin + _ID_BYTES].hex()

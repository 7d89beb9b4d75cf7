"""Leases of `Fleet.Route`: the client streams from the worker itself, and the worker reports how the request goes on.

    held --(worker: STARTED)--> started --(FIRST_TOKEN)--> --(ENDED)--> settled
      |                            |
      +-- lease_s passed           +-- the worker restarted, was removed, or its reports were interrupted

A lease that was interrupted is given up, not the request: its load is then part of what the worker reports, as is that
of a client that comes with a lease after it expired.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from router.dispatch.lease import Lease, Verdict
from router.metrics import RouterMetrics
from router.workers.listener import LeasePhase
from router.workers.state import WorkerState


@dataclass(frozen=True, slots=True)
class _Held:
    lease: Lease
    expiry: asyncio.TimerHandle


class LookAside:
    """All open leases of look-aside requests. A `LeaseListener`."""

    def __init__(self, lease_s: float, metrics: RouterMetrics) -> None:
        self.lease_s = lease_s
        """How long a lease lasts unless the worker says that its request started."""
        self._metrics = metrics
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, lease: Lease) -> str:
        """Keep `lease` until the worker reports its end, or it expires. Returns its id."""
        lease_id = secrets.token_hex(12)
        expiry = asyncio.get_running_loop().call_later(self.lease_s, self._end, lease_id, "expired")
        self._held[lease_id] = _Held(lease, expiry)
        return lease_id

    def close(self) -> None:
        """Settle all."""
        for lease_id in tuple(self._held):
            self._end(lease_id, "closed")

    def lease_event(self, worker: WorkerState, lease_id: str, phase: LeasePhase, cached_tokens: int) -> None:
        """See `LeaseListener`. A worker speaks for its own leases alone."""
        held = self._held.get(lease_id)
        if held is None or held.lease.worker is not worker:
            return
        if phase is LeasePhase.ENDED:
            self._end(lease_id, "ended", Verdict.ANSWERED)
            return
        held.expiry.cancel()
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
        held.expiry.cancel()
        held.lease.settle(verdict)
        self._metrics.leases.labels(outcome).inc()

"""Who is told what became of requests that the router does not carry itself."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from router.workers.state import WorkerState


class LeasePhase(Enum):
    """How far a request came that a client sent to the worker by itself, with a lease of ours."""

    STARTED = auto()
    FIRST_TOKEN = auto()
    ENDED = auto()


class LeaseListener(Protocol):
    """Called on the event loop, in the turn in which the router learns it; must neither block nor raise."""

    def lease_event(self, worker: WorkerState, lease_id: str, phase: LeasePhase, cached_tokens: int) -> None:
        """A leased request went on."""
        ...

    def events_lost(self, worker: WorkerState) -> None:
        """Lease events of this worker may have been missed: its state stream began anew."""
        ...

    def worker_gone(self, worker: WorkerState) -> None:
        """Its engine restarted, or it was removed: what was running there is over."""
        ...

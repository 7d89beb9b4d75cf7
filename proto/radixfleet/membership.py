"""What a member of a fleet (a router or a worker in an actor) tells its supervisor, about once a second.

Nothing here is on the path of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from radixfleet.types import Capacity, Load

WORKER_SLOT = "worker_slot"
"""Ray's resource of nodes without GPUs: as many as the node shall run workers."""

Phase: TypeAlias = Literal["starting", "serving", "draining", "drained", "failed"]
"""Where a member is in its life.

starting  it loads, its engine is being restarted, or no router has registered it yet
serving   it takes requests
draining  it takes no new requests and ends those that run
drained   nothing runs any more; it may be ended
failed    it cannot serve, and will not by itself; `MemberReport.message` says why
"""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """A member at one moment."""

    phase: Phase
    message: str = ""
    """Why it failed, or what its operator should change."""
    address: str = ""
    """host:port of its gRPC server; empty until it listens."""
    metrics_address: str = ""
    """host:port of its Prometheus page."""
    node_id: str = ""
    """Ray's name of the machine."""
    pids: tuple[int, ...] = ()
    """Process ids on that machine, the member's own first."""
    running_requests: int = 0
    load: Load | None = None
    """A worker's load, as its engine last reported it; None for a router."""
    capacity: Capacity | None = None
    """A worker's capacity; None until it has loaded, and for a router."""
    queued: Mapping[str, int] = field(default_factory=dict)
    """Requests that wait in a router for a worker, by model; empty for a worker."""

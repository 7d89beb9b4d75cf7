"""Snapshots for policy tests, with few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.types import WorkerId, WorkerStatus
from router.fleet_view import FleetView
from router.view import RequestView, WorkerView


@dataclass(frozen=True, slots=True)
class Changed:
    """A worker that is like this now."""

    view: WorkerView


def change(fleet: FleetView, position: int, view: WorkerView) -> None:
    """Tell `fleet` so."""
    fleet.changed(position, Changed(view), view.figures)


def worker(
    slot: int,
    *,
    running: int = 0,
    waiting: int = 0,
    queued_tokens: int = 0,
    max_running: int = 0,
    kv_tokens: int = 0,
    kv_protected: int = 0,
    sketch_blocks: int = 0,
    last_booking: int = 0,
    status: WorkerStatus = WorkerStatus.SERVING,
    connected: bool = True,
    breaker_open: bool = False,
) -> WorkerView:
    """Idle, healthy and of unknown size, but for what is given."""
    return WorkerView(
        slot=slot,
        worker_id=WorkerId(f"worker-{slot}"),
        status=status,
        connected=connected,
        breaker_open=breaker_open,
        running_requests=running,
        waiting_requests=waiting,
        max_running_requests=max_running,
        outstanding_prompt_tokens=queued_tokens,
        kv_tokens=kv_tokens,
        kv_protected_tokens=kv_protected,
        sketch_blocks=sketch_blocks,
        last_booking=last_booking,
    )


def request(prompt_tokens: int = 1_000, matched_blocks: Sequence[int] = (0,) * 16, *, prefix: int = 1) -> RequestView:
    """A prompt; equal `prefix` numbers give equal block hashes."""
    num_blocks = prompt_tokens // BLOCK_TOKENS
    hashes = np.arange(1, num_blocks + 1, dtype=np.uint64) + np.uint64(prefix * 1_000_000)
    return RequestView(prompt_tokens, hashes, matched_blocks)

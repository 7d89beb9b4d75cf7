"""What consoles show of a fleet: one row for the fleet, one for each worker, out of what `Fleet.ListWorkers` tells.

`radixfleet top` and the web console show the same rows, and their JSON is that of these values. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from radixfleet.answers import FleetReport, FleetState, WorkerEntry
from radixfleet.rates import HitSplit, PromptTokens, Recent, hit_split, rates
from radixfleet.types import MemoryPools

STATES = ("serving", "loading", "draining", "failed", "disconnected")


@dataclass(frozen=True, slots=True)
class KvPool:
    """Tokens of a KV pool: used + evictable + free = total."""

    used: int
    """By requests; cannot be evicted."""
    evictable: int
    """Cached prefixes that nobody uses now."""
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast it goes, and how well. None where nothing happened that could tell."""

    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    pace_window_s: float
    """Seconds over which the three figures above are averages."""
    hit_rate: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    bubble_share: float | None
    """Share of the time with work in which the device waited for the CPU."""
    busy_share: float
    prediction_error: float | None
    """Tokens by which the router's predictions missed, as a share of the prompt tokens."""
    retractions: int
    out_of_memory: int
    failed_requests: int
    window_s: float
    """Seconds over which all other figures are taken."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker."""

    worker: str
    """Its id; its address while it has never answered."""
    address: str
    state: str
    """One of STATES."""
    note: str
    """Why it gets no requests, where `state` does not say so; empty when it gets them."""
    model: str
    version: str
    running: int
    waiting: int
    max_running: int
    outstanding_prompt_tokens: int
    kv: KvPool
    memory: MemoryPools
    sketch_blocks: int
    approximate: bool
    pace: Pace
    prompt_tokens: PromptTokens
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FleetRow:
    """All workers together, and the router."""

    states: dict[str, int]
    """How many workers are in each of STATES."""
    models: tuple[str, ...]
    policy: str
    version: str
    uptime_s: float
    in_flight: int
    queued: int
    running: int
    waiting: int
    kv: KvPool
    sketch_blocks: int
    pace: Pace
    prompt_tokens: PromptTokens
    split: HitSplit | None
    """Where the prompt tokens went; None when none were asked for lately."""


@dataclass(frozen=True, slots=True)
class Overview:
    """A fleet."""

    fleet: FleetRow
    workers: tuple[WorkerRow, ...]
    """By name."""


def overview(report: FleetReport) -> Overview:
    """The rows of a report."""
    workers = sorted((worker_row(entry) for entry in report.workers), key=lambda row: row.worker)
    return Overview(fleet_row(report.fleet, workers), tuple(workers))


def worker_row(entry: WorkerEntry) -> WorkerRow:
    """The row of one worker."""
    state = entry.status.value if entry.connected else "disconnected"
    info, load = entry.info, entry.load
    used = load.kv_protected_tokens
    total = info.capacity.kv_tokens
    evictable = load.kv_evictable_tokens
    return WorkerRow(
        worker=entry.worker_id or entry.address,
        address=entry.address,
        state=state,
        note="" if entry.ineligible_reason == state else entry.ineligible_reason,
        model=info.model.model,
        version=info.version,
        running=load.running_requests,
        waiting=load.waiting_requests,
        max_running=info.capacity.max_running_requests,
        outstanding_prompt_tokens=load.outstanding_prompt_tokens,
        kv=KvPool(used, evictable, max(0, total - used - evictable), total),
        memory=info.memory,
        sketch_blocks=entry.sketch_blocks,
        approximate=entry.approximate,
        pace=_pace(entry.recent),
        prompt_tokens=_prompts(entry.recent),
        advice=info.advice,
    )


def fleet_row(fleet: FleetState, workers: Sequence[WorkerRow]) -> FleetRow:
    """The row of the whole fleet."""
    counted = Counter(worker.state for worker in workers)
    pools = [worker.kv for worker in workers]
    prompts = _prompts(fleet.recent)
    return FleetRow(
        states={state: counted[state] for state in STATES},
        models=tuple(sorted({worker.model for worker in workers if worker.model})),
        policy=fleet.policy,
        version=fleet.version,
        uptime_s=fleet.uptime_s,
        in_flight=fleet.requests_in_flight,
        queued=fleet.queued_requests,
        running=sum(worker.running for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
        kv=KvPool(
            sum(pool.used for pool in pools),
            sum(pool.evictable for pool in pools),
            sum(pool.free for pool in pools),
            sum(pool.total for pool in pools),
        ),
        sketch_blocks=fleet.sketch_blocks,
        pace=_pace(fleet.recent),
        prompt_tokens=prompts,
        split=hit_split(prompts),
    )


def _pace(recent: Sequence[Recent]) -> Pace:
    """Speeds from the shortest stretch, which follow; shares and quantiles from the longest, which stand still."""
    short, long = (recent[0], recent[-1]) if recent else (Recent(0.0), Recent(0.0))
    fast, slow = rates(short), rates(long)
    split = hit_split(long.prompt_tokens)
    return Pace(
        requests_per_s=fast.requests_per_s,
        output_tokens_per_s=fast.output_tokens_per_s,
        prompt_tokens_per_s=fast.prompt_tokens_per_s,
        pace_window_s=fast.seconds,
        hit_rate=slow.hit_rate,
        ttft_p50_s=slow.ttft_p50_s,
        ttft_p99_s=slow.ttft_p99_s,
        bubble_share=slow.bubble_share,
        busy_share=slow.busy_share,
        prediction_error=split.prediction_error if split else None,
        retractions=long.totals.retractions,
        out_of_memory=long.totals.out_of_memory,
        failed_requests=long.totals.failed_requests,
        window_s=slow.seconds,
    )


def _prompts(recent: Sequence[Recent]) -> PromptTokens:
    return recent[-1].prompt_tokens if recent else PromptTokens()

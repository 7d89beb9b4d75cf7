"""What a router tells of a fleet, made up: for the tests of consoles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from radixfleet.answers import FleetReport, FleetState, WorkerEntry, WorkerInfo
from radixfleet.rates import PromptTokens, Recent, Totals, ttft_bucket
from radixfleet.types import Capacity, Incarnation, Load, MemoryPools, ModelInfo, WorkerId, WorkerStatus

GIB = 1024**3
MODEL = ModelInfo("llama", 8192, 32_000, (2,), True, 1, "bfloat16", 8_000_000_000)
MEMORY = MemoryPools("cuda:0", 24 * GIB, 15 * GIB, 7 * GIB, 2 * GIB, "mem_fraction_static")
INFO = WorkerInfo(
    WorkerId("w0"), Incarnation(1), WorkerStatus.SERVING, MODEL, Capacity(10_000, 16, 64, 2048), MEMORY, "0.1.0", 1, 64
)


def totals(*, ttft_s: float = 0.09, requests: int = 10, **fields: Any) -> Totals:
    """Of requests that all had their first token after `ttft_s`."""
    counts = list(Totals().ttft_counts)
    counts[ttft_bucket(ttft_s)] = requests
    defaults = {"prompt_tokens": 1000, "cached_tokens": 750, "generated_tokens": 500, "step_s": 0.9, "bubble_s": 0.1}
    return Totals(requests=requests, ttft_counts=tuple(counts), **(defaults | fields))


def recent(seconds: float = 10.0, prompts: PromptTokens | None = None, **fields: Any) -> Recent:
    """What happened in so many seconds."""
    return Recent(seconds, totals(**fields), prompts or PromptTokens(1000, 900, 800, 750, 60))


def entry(name: str = "w0", *, advice: tuple[str, ...] = (), model: str = "llama", **fields: Any) -> WorkerEntry:
    """A worker that serves."""
    info = replace(INFO, worker_id=WorkerId(name), advice=advice, model=replace(MODEL, model=model))
    defaults: dict[str, Any] = {
        "worker_id": WorkerId(name),
        "address": f"{name}:7080",
        "status": WorkerStatus.SERVING,
        "connected": True,
        "info": info,
        "load": Load(4, 2, 300, 4000, 5000),
        "booked_requests": 6,
        "booked_prompt_tokens": 300,
        "sketch_blocks": 140,
        "approximate": False,
        "ineligible_reason": "",
        "recent": (recent(10.0), recent(60.0)),
    }
    return WorkerEntry(**(defaults | fields))


def report(*workers: WorkerEntry, **fields: Any) -> FleetReport:
    """A fleet of these workers."""
    defaults: dict[str, Any] = {
        "uptime_s": 3700.0,
        "policy": "min_cost",
        "requests_in_flight": 7,
        "queued_requests": 1,
        "sketch_blocks": 200,
        "recent": (recent(10.0), recent(60.0)),
        "version": "0.1.0",
    }
    return FleetReport(FleetState(**(defaults | fields)), workers)

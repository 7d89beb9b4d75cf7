"""A worker's load in the words of the engines' dialects."""

from __future__ import annotations

from typing import Any

from smg_grpc_proto.generated import common_pb2

from radixfleet.types import Load
from worker.core.messages import Ready, Report

_GIB = 1024**3


def engine_load(report: Report | None, ready: Ready | None) -> Any:
    """EngineLoad; zeros before the engine has reported."""
    load = report.load if report is not None else Load()
    total = ready.capacity.kv_tokens if ready is not None else 0
    record = common_pb2.EngineLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        waiting_uncached_tokens=load.outstanding_prompt_tokens,
        token_usage=share(used_tokens(load), total),
        active_token_usage=share(load.kv_protected_tokens, total),
        prefill_pending_tokens=load.outstanding_prompt_tokens,
        num_used_tokens=used_tokens(load),
        max_total_num_tokens=total,
    )
    if ready is not None:
        record.max_running_requests = ready.capacity.max_running_requests
        record.memory.weight_gb = ready.memory.weights_bytes / _GIB
        record.memory.kv_cache_gb = ready.memory.kv_bytes / _GIB
        record.memory.token_capacity = total
    record.cache_hit_rate = hit_rate(report)
    return record


def used_tokens(load: Load) -> int:
    """KV tokens that hold something, evictable or not."""
    return load.kv_protected_tokens + load.kv_evictable_tokens


def share(part: int, whole: int) -> float:
    """In [0, 1]."""
    return min(1.0, part / whole) if whole else 0.0


def hit_rate(report: Report | None) -> float:
    """Share of all prompt tokens since the engine's start that were found in its cache."""
    if report is None:
        return 0.0
    return share(int(report.counters.get("cached_tokens", 0)), int(report.counters.get("prompt_tokens", 0)))

"""All metrics of a router and of a worker, read from registries made for the purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from router.metrics import FleetSample, RouterMetrics, WorkerSample
from worker.metrics import BuildInfo, WorkerMetrics

_UNITS = ("seconds", "bytes", "tokens", "requests", "blocks", "steps")
_COUNTED = {
    "leases": "leases",
    "decisions": "choices",
    "retries": "tries",
    "workers": "workers",
    "refusals": "requests",
    "sequences": "requests",
}
_OF_HISTOGRAMS = frozenset({"le"})
_SAMPLE = WorkerSample(
    worker="worker",
    status="serving",
    eligible=True,
    approximate=False,
    breaker="closed",
    breaker_opened=0,
    running_requests=0,
    waiting_requests=0,
    outstanding_prompt_tokens=0,
    booked_requests=0,
    booked_prompt_tokens=0,
    kv_protected_tokens=0,
    sketch_blocks=0,
    update_age_s=0.0,
)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, as a query names it; a histogram without _bucket, _sum and _count."""

    name: str
    kind: str
    unit: str
    """What it counts or measures; "events" for occurrences, "0 or 1" for states."""
    labels: Sequence[str]
    meaning: str


def families(process: str) -> Sequence[Family]:
    """All of a process, "router" or "worker", in the order of its endpoint; without those of the process itself."""
    metrics = PROCESSES[process]()
    return [_family(metric) for metric in metrics if metric.name.startswith("radixfleet_")]


def _family(metric: Metric) -> Family:
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels if label not in _OF_HISTOGRAMS)
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return Family(name, metric.type, _unit(metric), tuple(labels), metric.documentation)


def _unit(metric: Metric) -> str:
    words = metric.name.split("_")
    for word in reversed(words):
        if word in _UNITS or word in _COUNTED:
            return _COUNTED.get(word, word)
    return "events" if metric.type == "counter" else "0 or 1"


def _router() -> Sequence[Metric]:
    async def collect() -> Sequence[Metric]:
        metrics = RouterMetrics()
        metrics.watch_fleet(lambda: FleetSample([_SAMPLE], 0), asyncio.get_running_loop())
        return await asyncio.to_thread(_collect, metrics.registry)

    return asyncio.run(collect())


def _worker() -> Sequence[Metric]:
    return _collect(WorkerMetrics(BuildInfo("", "", "", "")).registry)


def _collect(registry: CollectorRegistry) -> Sequence[Metric]:
    return list(registry.collect())


PROCESSES: Mapping[str, Callable[[], Sequence[Metric]]] = {"worker": _worker, "router": _router}

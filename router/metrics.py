"""What the router counts. One registry of its own; names begin with radixfleet_router_.

Why did the hit rate fall? Four counters of prompt tokens, added together when a worker says what it found cached:
asked >= reachable (on the best eligible worker) >= predicted (on the chosen one), and actual (what the worker found).
asked - reachable is the workload, reachable - predicted the routing, predicted - actual the index's error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from radixfleet.telemetry import (
    DECISION_BUCKETS_S,
    GAP_BUCKETS_S,
    QUEUE_BUCKETS_S,
    REQUEST_BUCKETS_S,
    TTFT_BUCKETS_S,
)

OUTCOMES = (
    "ok",
    "cancelled",
    "deadline_exceeded",
    "invalid_argument",
    "not_found",
    "resource_exhausted",
    "unavailable",
    "internal",
)
REASONS = ("only", "prefix", "spill", "load", "turn", "chance", "hash")
QUEUE_REFUSALS = ("full", "deadline")
DOOR_REFUSALS = ("unauthenticated", "permission_denied", "resource_exhausted")
RETRY_RESULTS = ("retried", "resumed", "refused")
LEASE_OUTCOMES = ("ended", "released", "expired", "interrupted", "closed")

_PREFIX = "radixfleet_router_"
_SAMPLE_TIMEOUT_S = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker at the moment of a scrape."""

    worker: str
    status: str
    """As reported; "disconnected" without a live state stream, "unknown" when it never answered."""
    eligible: bool
    approximate: bool
    breaker: str
    breaker_opened: int
    """How often."""
    running_requests: int
    waiting_requests: int
    outstanding_prompt_tokens: int
    booked_requests: int
    booked_prompt_tokens: int
    kv_protected_tokens: int
    sketch_blocks: int
    update_age_s: float


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The fleet at the moment of a scrape."""

    workers: Sequence[WorkerSample]
    sketch_blocks: int


class RouterMetrics:
    """All counters and histograms; `watch_fleet` adds gauges that are read when they are scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = self._counter(
            "requests", "Generate requests, by how they ended: ok, or the gRPC status in lower case.", outcome=OUTCOMES
        )
        self.in_flight = Gauge(f"{_PREFIX}requests_in_flight", "Generate requests now.", registry=self.registry)
        self.queued = Gauge(f"{_PREFIX}queued_requests", "Requests that wait for a worker.", registry=self.registry)
        self.queue_refusals = self._counter(
            "queue_refusals",
            "Requests that all workers were too busy for: the queue was full, or the deadline passed in it.",
            cause=QUEUE_REFUSALS,
        )
        self.door_refusals = self._counter(
            "door_refusals",
            "Calls turned away before they were looked at: no key or a wrong one, a client's key where the admin token "
            "is needed, or more than a client may ask for.",
            cause=DOOR_REFUSALS,
        )
        self.queue_s = self._histogram("queue_seconds", "Waits for a worker, of requests that waited.", QUEUE_BUCKETS_S)
        self.decisions = DecisionTally()
        self.registry.register(self.decisions)
        self.prompt_tokens = PromptTally()
        self.registry.register(self.prompt_tokens)
        self.retries = self._counter(
            "retries",
            "Requests whose worker failed: retried, resumed in the middle of the answer, or refused by the budget.",
            result=RETRY_RESULTS,
        )
        self.leases = self._counter("leases", "Leases of Fleet.Route, by how they ended.", outcome=LEASE_OUTCOMES)
        self.resyncs = self._counter("resyncs", "State streams begun anew because a report was missing.")
        self.state_gap_s = self._histogram(
            "state_gap_seconds", "Between two reports of a worker, on one state stream.", GAP_BUCKETS_S
        )
        self.tokenize_s = self._histogram(
            "tokenize_seconds", "Tokenizing and hashing a prompt, the wait for a thread included.", QUEUE_BUCKETS_S
        )
        self.ttft_s = self._histogram("ttft_seconds", "From the request to its first token.", TTFT_BUCKETS_S)
        self.request_s = self._histogram("request_seconds", "From the request to its end.", REQUEST_BUCKETS_S)
        self._certificate_expiry = Gauge(
            f"{_PREFIX}tls_certificate_expiry_timestamp_seconds",
            "Unix time at which its own TLS certificate, or one of its chain, expires; 0 without TLS.",
            registry=self.registry,
        )

    def watch_certificate(self, expires_s: Callable[[], float]) -> None:
        """Export when the certificate expires, read with each scrape on the scrape's thread."""
        self._certificate_expiry.set_function(expires_s)

    def watch_fleet(self, sample: Callable[[], FleetSample], loop: asyncio.AbstractEventLoop) -> None:
        """Export a sample with each scrape. It is taken on `loop`, whose thread owns what it reads."""
        self.registry.register(_FleetCollector(sample, loop))

    def _counter(self, name: str, text: str, **labels: Sequence[str]) -> Counter:
        """A counter without labels, or with one whose values are all exported from the start, as 0."""
        counter = Counter(f"{_PREFIX}{name}", text, tuple(labels), registry=self.registry)
        for values in labels.values():
            for value in values:
                counter.labels(value)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{_PREFIX}{name}", text, buckets=buckets, registry=self.registry)


class DecisionTally(Collector):
    """Choices of a worker. Plain sums, added to on the event loop and read by scrapes on their thread:

    a `Counter` and a `Histogram` take three locks for each, which cost a tenth of the choice.
    """

    def __init__(self) -> None:
        self._by_reason = dict.fromkeys(REASONS, 0)
        self._by_bucket = [0] * (len(DECISION_BUCKETS_S) + 1)
        """The last are those that took longer."""
        self._seconds = 0.0

    def count(self, reason: str, seconds: float) -> None:
        """One choice, with its booking."""
        self._by_reason[reason] += 1
        self._by_bucket[bisect_left(DECISION_BUCKETS_S, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """A counter and a histogram."""
        decisions = CounterMetricFamily(
            f"{_PREFIX}decisions", "Choices of a worker, by why it was chosen.", labels=["reason"]
        )
        for reason, count in self._by_reason.items():
            decisions.add_metric([reason], count)
        yield decisions
        bounds = [*map(floatToGoString, DECISION_BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._by_bucket), strict=True))
        name, text = f"{_PREFIX}decision_seconds", "Choosing and booking a worker."
        yield HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._seconds)


class PromptTally(Collector):
    """Prompt tokens of started requests. Plain sums, as above: four locks cost as much as all else at its start."""

    def __init__(self) -> None:
        self.asked = self.reachable = self.predicted = self.actual = 0

    def count(self, asked: int, reachable: int, predicted: int, actual: int) -> None:
        """One request started."""
        self.asked += asked
        self.reachable += reachable
        self.predicted += predicted
        self.actual += actual

    def collect(self) -> Iterator[Metric]:
        """The four counters."""
        told = {
            "asked": ("Prompt tokens of started requests.", self.asked),
            "reachable": ("Of these, thought to be cached on the best eligible worker.", self.reachable),
            "predicted": ("Of these, thought to be cached on the chosen worker.", self.predicted),
            "actual": ("Of these, found in its cache by the chosen worker.", self.actual),
        }
        for name, (text, tokens) in told.items():
            yield CounterMetricFamily(f"{_PREFIX}prompt_tokens_{name}", text, tokens)


_WORKER_GAUGES: dict[str, tuple[str, Callable[[WorkerSample], float]]] = {
    "worker_eligible": ("1 when the worker gets requests.", lambda worker: worker.eligible),
    "worker_approximate": ("1 when the worker's word on its cache is missing.", lambda worker: worker.approximate),
    "worker_running_requests": ("Running requests, reported and booked.", lambda worker: worker.running_requests),
    "worker_waiting_requests": ("Waiting requests, reported.", lambda worker: worker.waiting_requests),
    "worker_outstanding_prompt_tokens": (
        "Prompt tokens still to be computed, reported and booked.",
        lambda worker: worker.outstanding_prompt_tokens,
    ),
    "worker_booked_requests": ("Requests booked by this router.", lambda worker: worker.booked_requests),
    "worker_booked_prompt_tokens": (
        "Uncached prompt tokens booked by this router, without a first token.",
        lambda worker: worker.booked_prompt_tokens,
    ),
    "worker_kv_protected_tokens": ("KV tokens in use, reported.", lambda worker: worker.kv_protected_tokens),
    "worker_sketch_blocks": ("Routing blocks in the sketch.", lambda worker: worker.sketch_blocks),
    "worker_update_age_seconds": ("Since the worker's last report.", lambda worker: worker.update_age_s),
}


class _FleetCollector(Collector):
    def __init__(self, sample: Callable[[], FleetSample], loop: asyncio.AbstractEventLoop) -> None:
        self._sample = sample
        self._loop = loop

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not take a sample, for that waits for the loop that registers."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """On the thread of the scrape. Without the fleet's gauges when the event loop does not answer in time."""
        fleet = ask_loop(self._sample, self._loop)
        if fleet is None:
            return
        yield GaugeMetricFamily(f"{_PREFIX}sketch_blocks", "Distinct blocks in the sketch.", fleet.sketch_blocks)
        statuses = GaugeMetricFamily(f"{_PREFIX}workers", "Workers, by status.", labels=["status"])
        for status in ("serving", "loading", "draining", "failed", "disconnected", "unknown"):
            statuses.add_metric([status], sum(worker.status == status for worker in fleet.workers))
        yield statuses
        for name, (text, read) in _WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["worker"])
            for worker in fleet.workers:
                gauge.add_metric([worker.worker], read(worker))
            yield gauge
        breakers = GaugeMetricFamily(
            f"{_PREFIX}worker_breaker", "1 for the state of the worker's circuit breaker.", labels=["worker", "state"]
        )
        for worker in fleet.workers:
            for state in ("closed", "open", "half_open"):
                breakers.add_metric([worker.worker, state], worker.breaker == state)
        yield breakers
        opened = CounterMetricFamily(
            f"{_PREFIX}worker_breaker_opened", "Times that the worker's circuit breaker opened.", labels=["worker"]
        )
        for worker in fleet.workers:
            opened.add_metric([worker.worker], worker.breaker_opened)
        yield opened


def ask_loop(read: Callable[[], _T], loop: asyncio.AbstractEventLoop) -> _T | None:
    """What `read` gives on the loop's thread, asked from another one; None when the loop does not answer in time."""

    async def take() -> _T:
        return read()

    taking = take()
    try:
        return asyncio.run_coroutine_threadsafe(taking, loop).result(_SAMPLE_TIMEOUT_S)
    except (TimeoutError, concurrent.futures.CancelledError):
        return None
    except RuntimeError:  # the loop is closed
        taking.close()
        return None

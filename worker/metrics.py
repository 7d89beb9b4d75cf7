"""What a worker shows to Prometheus. One registry a worker, so that a process can hold many.

Used from the front's event loop; Prometheus reads from a thread of its own, which its library allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from radixfleet.telemetry import (
    INTER_TOKEN_BUCKETS_S,
    LENGTH_BUCKETS_TOKENS,
    QUEUE_BUCKETS_S,
    REQUEST_BUCKETS_S,
    STEP_BUCKETS_S,
    TTFT_BUCKETS_S,
)
from radixfleet.types import Capacity, Load, MemoryPools, WorkerStatus

_BUBBLE_BUCKETS_S = (1e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)

STEP_STAGES = ("prefill", "decode", "sampling")
SHORT_STAGES = (*STEP_STAGES, "kv_full")
"""Stages at which memory runs short while serving, as `worker.memory.advisor.Stage` names them."""
ENGINE_TOTALS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_tokens": "Prompt tokens whose KV was found in the cache at admission.",
    "generated_tokens": "Tokens generated.",
    "discarded_tokens": "Tokens that a step computed for a request that had ended by then.",
    "retractions": "Running requests put back into the queue: the KV pool ran full, or one of higher priority came.",
    "preemptions": "Of these, for a waiting request of higher priority.",
    "steps": "Steps that the device ended.",
    "failed_steps": "Steps that failed as a whole.",
}
"""Of the engine's totals (`Report.counters`), those shown: name there -> help."""


STEP_KINDS = ("prefill", "decode", "mixed")
_COMPUTED = ("prompt", "decode")
_POOLS = ("weights", "kv", "activations")


class Outcome(StrEnum):
    """How a request ended, as its client saw it. Cancelled is neither success nor failure."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    """Ended by Worker.Abort or by a drain."""
    CANCELLED = "cancelled"
    """The client went away."""
    DEADLINE = "deadline"
    """The client's deadline passed."""
    REFUSED = "refused"
    """The request itself was wrong."""
    UNAVAILABLE = "unavailable"
    """Not serving, or the engine died."""
    FAILED = "failed"
    """Our own fault."""


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """Constants of one worker, as labels of `radixfleet_worker_build_info`."""

    version: str
    worker_id: str
    model: str
    runner: str


class WorkerMetrics:
    """All series of one worker, named radixfleet_worker_*."""

    def __init__(self, build: BuildInfo) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gauge(
            "build_info", "Constant 1; the labels say what runs.", "version", "worker_id", "model", "runner"
        ).labels(build.version, build.worker_id, build.model, build.runner).set(1)
        self._status = self._gauge("status", "1 for the status that the worker is in, 0 for the others.", "status")
        self._running = self._gauge("running_requests", "Requests that have a place in the engine.")
        self._waiting = self._gauge("waiting_requests", "Requests in the queue.")
        self._outstanding = self._gauge(
            "outstanding_prompt_tokens",
            "Prompt tokens of waiting and prefilling requests, not cached and not computed.",
        )
        self._kv_used = self._gauge("kv_used_tokens", "KV tokens that requests use and that cannot be evicted.")
        self._kv_evictable = self._gauge("kv_evictable_tokens", "KV tokens in the cache that could be evicted at once.")
        self._kv_total = self._gauge("kv_total_tokens", "KV tokens that the pool holds.")
        self._pool_bytes = self._gauge("memory_bytes", "Device memory by pool: weights, kv, activations.", "pool")
        self._device_bytes = self._gauge("device_memory_bytes", "Device memory that was planned with.")
        self._certificate_expiry = self._gauge(
            "tls_certificate_expiry_timestamp_seconds",
            "Unix time at which its own TLS certificate, or one of its chain, expires; 0 without TLS.",
        )
        self._ttft = self._histogram("ttft_seconds", "From arrival to the first token.", TTFT_BUCKETS_S)
        self._inter_token = self._histogram("inter_token_seconds", "Between two tokens.", INTER_TOKEN_BUCKETS_S)
        self._queue = self._histogram("queue_seconds", "From arrival to the first step.", QUEUE_BUCKETS_S)
        self._request = self._histogram(
            "request_seconds", "From arrival to the end, however it came.", REQUEST_BUCKETS_S
        )
        self._step = self._histogram("step_seconds", "Duration of a step on the device.", STEP_BUCKETS_S)
        self._bubble = self._histogram(
            "bubble_seconds", "Time before a step that the device idled while work was waiting.", _BUBBLE_BUCKETS_S
        )
        self._requests = self._counter("requests", "Requests by outcome.", "outcome")
        self._restarts = self._counter("engine_restarts", "Times that the engine died and was started again.")
        self._engine = {name: self._counter(name, text) for name, text in ENGINE_TOTALS.items()}
        self._engine["scheduling_s"] = self._counter(
            "scheduling_seconds", "Seconds that the engine's thread spent on scheduling."
        )
        self._planned_steps = self._counter(
            "planned_steps", "Steps planned: with chunks of prompts alone, decodes alone, or both.", "kind"
        )
        self._computed = self._counter(
            "computed_tokens", "Tokens computed in steps: of prompts (again after a retraction), or decodes.", "kind"
        )
        self._evicted_blocks = self._counter("evicted_blocks", "Blocks of 64 tokens that left the prefix cache.")
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of an admitted request.", LENGTH_BUCKETS_TOKENS
        )
        self._output_length = self._histogram(
            "request_generated_tokens", "Tokens of an answer that ended, however it did.", LENGTH_BUCKETS_TOKENS
        )
        self._out_of_memory = self._counter(
            "out_of_memory", "Steps taken back for want of device memory, to be tried again smaller.", "stage"
        )
        self._memory_short = self._gauge("memory_short", "1 while memory is short at a stage, or was lately.", "stage")
        self._step_limits = (
            self._gauge("step_prompt_tokens_limit", "Prompt tokens that a step may have; less after a shortage."),
            self._gauge("step_sequences_limit", "Requests that a step may have; less after a shortage."),
        )
        self._totals: dict[str, float] = {}
        """The engine's totals as last seen; they begin at 0 with each incarnation."""
        self._begin_at_zero()
        self.memory((0, 0), {})
        self.status_changed(WorkerStatus.LOADING)

    def _begin_at_zero(self) -> None:
        """Make every labelled series that is known beforehand: a rate needs the zero before the first event."""
        for outcome in Outcome:
            self._requests.labels(outcome.value)
        for stage in STEP_STAGES:
            self._out_of_memory.labels(stage)
        for kind in STEP_KINDS:
            self._planned_steps.labels(kind)
        for kind in _COMPUTED:
            self._computed.labels(kind)
        for pool in _POOLS:
            self._pool_bytes.labels(pool)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"radixfleet_worker_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"radixfleet_worker_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"radixfleet_worker_{name}", text, buckets=buckets, registry=self.registry)

    def watch_certificate(self, expires_s: Callable[[], float]) -> None:
        """Export when the certificate expires, read with each scrape on the scrape's thread."""
        self._certificate_expiry.set_function(expires_s)

    def status_changed(self, status: WorkerStatus) -> None:
        """The worker's status is `status` from now on."""
        for each in WorkerStatus:
            self._status.labels(each.value).set(each is status)

    def engine_started(self, capacity: Capacity, memory: MemoryPools) -> None:
        """An engine is ready."""
        self._kv_total.set(capacity.kv_tokens)
        self._device_bytes.set(memory.total_bytes)
        for pool, size in zip(_POOLS, (memory.weights_bytes, memory.kv_bytes, memory.activations_bytes), strict=True):
            self._pool_bytes.labels(pool).set(size)

    def engine_lost(self) -> None:
        """The engine died: nothing runs, nothing is cached, its totals begin again."""
        self._restarts.inc()
        self._totals = {}
        self._show_load(Load())
        self.memory((0, 0), {})

    def report(
        self, load: Load, counters: Mapping[str, float], step_s: Sequence[float], bubble_s: Sequence[float]
    ) -> None:
        """The engine's report: its load, its totals, and the steps since the last one."""
        self._show_load(load)
        for name, counter in self._engine.items():
            counter.inc(self._increase(counters, name))
        for stage in STEP_STAGES:
            self._out_of_memory.labels(stage).inc(self._increase(counters, f"out_of_memory_{stage}"))
        for kind in STEP_KINDS:
            self._planned_steps.labels(kind).inc(self._increase(counters, f"{kind}_steps"))
        prompt_tokens = self._increase(counters, "prompt_step_tokens")
        self._computed.labels("prompt").inc(prompt_tokens)
        self._computed.labels("decode").inc(max(0.0, self._increase(counters, "computed_tokens") - prompt_tokens))
        self._totals = dict(counters)
        for duration in step_s:
            self._step.observe(duration)
        for duration in bubble_s:
            self._bubble.observe(duration)

    def evicted(self, blocks: int) -> None:
        """So many blocks left the cache since the last report."""
        self._evicted_blocks.inc(blocks)

    def memory(self, step_limits: tuple[int, int], short_stages: Collection[str]) -> None:
        """The size that steps may have (prompt tokens, requests), and where memory is short."""
        for gauge, limit in zip(self._step_limits, step_limits, strict=True):
            gauge.set(limit)
        for stage in SHORT_STAGES:
            self._memory_short.labels(stage).set(stage in short_stages)

    def _increase(self, counters: Mapping[str, float], name: str) -> float:
        """Of one of the engine's totals since the last report."""
        return max(0.0, counters.get(name, 0.0) - self._totals.get(name, 0.0))

    def _show_load(self, load: Load) -> None:
        self._running.set(load.running_requests)
        self._waiting.set(load.waiting_requests)
        self._outstanding.set(load.outstanding_prompt_tokens)
        self._kv_used.set(load.kv_protected_tokens)
        self._kv_evictable.set(load.kv_evictable_tokens)

    def admitted(self, queue_s: float, prompt_tokens: int) -> None:
        """A request left the queue."""
        self._queue.observe(queue_s)
        self._prompt_length.observe(prompt_tokens)

    def first_token(self, ttft_s: float) -> None:
        """A request has its first token."""
        self._ttft.observe(ttft_s)

    def tokens(self, count: int, seconds: float) -> None:
        """`count` further tokens of a request came `seconds` after the one before."""
        for _ in range(count):
            self._inter_token.observe(seconds / count)

    def answered(self, generated_tokens: int) -> None:
        """The answer of an admitted request ended, with so many tokens."""
        self._output_length.observe(generated_tokens)

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """A request ended, `seconds` after it came."""
        self._requests.labels(outcome.value).inc()
        self._request.observe(seconds)

"""The plan of a device's memory: three pools, by arithmetic alone, before any of them is allocated.

    weights        fixed: what the loaded model takes
    KV cache       the least of   mem_fraction_static x (total - weights)        the operator's share
                                  (total - weights) - activation peak            what the largest step leaves, beside
                                                    - CUDA graphs                what recorded steps keep
                                  max_total_tokens, and the padding page         where the operator caps it
                   in whole pages; the padding sink is one of them
    activations    the rest: never less than the measured peak and the graphs

The peak is measured by the runner, in a dummy step at the largest chunk and batch; what CUDA graphs keep, by recording
some of them. A plan that cannot serve one request of the length asked for is an error with advice. Called by the runner
at start, on any device: where the device's size is a setting (a CPU), the same arithmetic fails in the same ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from radixfleet.types import MemoryPools
from worker.memory.advisor import Advice, Bound, Shortage, Stage, advise, format_bytes
from worker.memory.page_allocator import pages_for

_GIB = 1 << 30
_CHUNK_BY_DEVICE = ((20 * _GIB, 2048), (60 * _GIB, 4096), (160 * _GIB, 8192))
_LARGEST_CHUNK = 16384
_CHUNK_CPU = 1024
_KV_TOKENS_PER_ROW = 512
_MOST_ROWS = 256
_MOST_ROWS_CPU = 32
_LEAST_CONTEXT_TOKENS = 128
"""A pool that cannot hold one request of this length is of no use, unless the operator asked for so small a one."""


class MemoryPlanError(Exception):
    """The model cannot be served with this memory and these settings. `str(error)` says what to change."""

    def __init__(self, advice: Advice) -> None:
        super().__init__(advice.text)
        self.advice = advice


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """What the plan is made from."""

    device: str
    total_bytes: int
    """Memory of the device that the worker may use."""
    weights_bytes: int
    activation_peak_bytes: int
    """Measured: the most that a step holds beside weights and KV, sampling included."""
    kv_bytes_per_token: int
    """Keys and values of one token in all layers."""
    page_size: int
    mem_fraction_static: float = 0.9
    max_total_tokens: int | None = None
    """Cap on the KV pool in tokens; None: none."""
    min_context_tokens: int | None = None
    """Length that one request must be able to reach, prompt and completion: what the operator asked for. None: nothing
    was, and any length of use will do."""
    graphs_bytes: int = 0
    """Measured: what CUDA graphs keep for as long as the worker serves, beside what a step holds."""
    peak_is_estimate: bool = False
    """The activation peak and the graphs were worked out, not measured: a plan made without the device."""


@dataclass(frozen=True, slots=True)
class KvLimit:
    """What one bound allows the KV pool."""

    reason: str
    """In words, with its numbers."""
    num_bytes: int
    binds: bool
    """It is the one that the pool's size comes from."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The three pools. weights + KV + activations = total."""

    device: str
    total_bytes: int
    weights_bytes: int
    kv_bytes: int
    activations_bytes: int
    activation_peak_bytes: int
    graphs_bytes: int
    num_pages: int
    """Pages of the KV pool, the padding sink included: what `PageAllocator` and `TokenToKVPool` are made with."""
    page_size: int
    bounded_by: str
    """In words: what to change to change the size of the KV pool."""
    kv_limits: tuple[KvLimit, ...]
    """All bounds of the KV pool, the share first."""
    peak_is_estimate: bool

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds: the longest request, too."""
        return (self.num_pages - 1) * self.page_size

    def pools(self) -> MemoryPools:
        """As the worker tells it."""
        return MemoryPools(
            device=self.device,
            total_bytes=self.total_bytes,
            weights_bytes=self.weights_bytes,
            kv_bytes=self.kv_bytes,
            activations_bytes=self.activations_bytes,
            bounded_by=self.bounded_by,
        )

    def table(self) -> list[tuple[str, str, str, str]]:
        """Rows for printing: pool, size, share of the device, remark."""
        kv = f"{self.kv_tokens:,} tokens in pages of {self.page_size}"
        peak = f"{'estimated' if self.peak_is_estimate else 'measured'} peak {format_bytes(self.activation_peak_bytes)}"
        if self.graphs_bytes:
            peak += f", CUDA graphs {format_bytes(self.graphs_bytes)}"
        return [
            self._row("weights", self.weights_bytes, "the model"),
            self._row("KV cache", self.kv_bytes, kv),
            self._row("activations", self.activations_bytes, peak),
            self._row("total", self.total_bytes, self.device),
        ]

    def _row(self, pool: str, num_bytes: int, remark: str) -> tuple[str, str, str, str]:
        return pool, format_bytes(num_bytes), f"{100 * num_bytes / self.total_bytes:.1f} %", remark


def plan_memory(demand: MemoryDemand) -> MemoryPlan:
    """Divide the device's memory. Raises MemoryPlanError when the model or one request cannot fit."""
    _check_settings(demand)
    remaining = demand.total_bytes - demand.weights_bytes
    if remaining <= 0:
        raise MemoryPlanError(advise(Stage.LOAD, Shortage(demand.weights_bytes, demand.total_bytes)))
    page_bytes = demand.page_size * demand.kv_bytes_per_token
    limits = _kv_limits(demand, remaining, page_bytes)
    bound = min(limits, key=lambda which: limits[which])
    num_pages = max(limits[bound], 0) // page_bytes
    needed_pages = 1 + pages_for(_least_context(demand), demand.page_size)
    if num_pages < needed_pages:
        raise MemoryPlanError(_advice_for_small_pool(demand, limits, bound, needed_pages * page_bytes, remaining))
    kv_bytes = num_pages * page_bytes
    return MemoryPlan(
        device=demand.device,
        total_bytes=demand.total_bytes,
        weights_bytes=demand.weights_bytes,
        kv_bytes=kv_bytes,
        activations_bytes=remaining - kv_bytes,
        activation_peak_bytes=demand.activation_peak_bytes,
        graphs_bytes=demand.graphs_bytes,
        num_pages=num_pages,
        page_size=demand.page_size,
        bounded_by=_in_words(bound, demand),
        kv_limits=tuple(
            KvLimit(_reason(which, demand, remaining), size, which is bound) for which, size in limits.items()
        ),
        peak_is_estimate=demand.peak_is_estimate,
    )


def kv_bound_of(pools: MemoryPools) -> Bound:
    """What the KV pool's size comes from, by the words in `pools.bounded_by`."""
    return next((bound for bound in (Bound.CAP, Bound.ACTIVATIONS) if bound in pools.bounded_by), Bound.FRACTION)


def chunked_prefill_size_for(device_bytes: int, *, on_cpu: bool) -> int:
    """The default chunk, in tokens: on a GPU by its memory.

    A CPU computes larger chunks no faster, and running requests wait for each.
    """
    if on_cpu:
        return _CHUNK_CPU
    for below, chunk in _CHUNK_BY_DEVICE:
        if device_bytes < below:
            return chunk
    return _LARGEST_CHUNK


def max_running_requests_for(kv_tokens: int, *, on_cpu: bool) -> int:
    """The default number of rows: one for each 512 tokens of the KV pool, within what a step of the device is good for.

    A CPU gains nothing from larger batches, which only make each token later.
    """
    return min(max(kv_tokens // _KV_TOKENS_PER_ROW, 1), _MOST_ROWS_CPU if on_cpu else _MOST_ROWS)


def _check_settings(demand: MemoryDemand) -> None:
    if not 0 < demand.mem_fraction_static < 1:
        raise ValueError(f"mem_fraction_static is in (0, 1), not {demand.mem_fraction_static}")
    if demand.page_size < 1 or demand.kv_bytes_per_token < 1 or _least_context(demand) < 1:
        raise ValueError("page_size, kv_bytes_per_token and min_context_tokens are at least 1")


def _least_context(demand: MemoryDemand) -> int:
    if demand.min_context_tokens is not None:
        return demand.min_context_tokens
    return min(_LEAST_CONTEXT_TOKENS, demand.max_total_tokens or _LEAST_CONTEXT_TOKENS)


def _kv_limits(demand: MemoryDemand, remaining: int, page_bytes: int) -> dict[Bound, int]:
    """Bytes that each bound allows the KV pool, the share first: the order that settles ties."""
    limits = {
        Bound.FRACTION: math.floor(demand.mem_fraction_static * remaining),
        Bound.ACTIVATIONS: remaining - demand.activation_peak_bytes - demand.graphs_bytes,
    }
    if demand.max_total_tokens is not None:
        limits[Bound.CAP] = (1 + pages_for(demand.max_total_tokens, demand.page_size)) * page_bytes
    return limits


def _advice_for_small_pool(
    demand: MemoryDemand, limits: dict[Bound, int], bound: Bound, needed: int, remaining: int
) -> Advice:
    """Name the bound that has to give way: of several, the one that is hardest to move comes first."""
    # Rounded up to three digits, strictly, so that the share's own rounding down cannot make it one page too few.
    share = (math.floor(1000 * needed / remaining) + 1) / 1000
    if share >= 1:
        return advise(Stage.START, Shortage(needed, remaining, Bound.DEVICE))
    if limits[Bound.ACTIVATIONS] < needed <= limits[Bound.ACTIVATIONS] + demand.graphs_bytes:
        return advise(Stage.START, Shortage(needed, max(limits[Bound.ACTIVATIONS], 0), Bound.GRAPHS))
    if needed > limits[Bound.ACTIVATIONS]:
        return advise(Stage.START, Shortage(needed, max(limits[Bound.ACTIVATIONS], 0), Bound.ACTIVATIONS))
    if bound is Bound.CAP:
        enough = str(_least_context(demand))
        return advise(Stage.START, Shortage(needed, limits[Bound.CAP], Bound.CAP, enough))
    return advise(Stage.START, Shortage(needed, limits[Bound.FRACTION], Bound.FRACTION, f"{share:g}"))


def _in_words(bound: Bound, demand: MemoryDemand) -> str:
    if bound is Bound.FRACTION:
        return f"mem_fraction_static = {demand.mem_fraction_static:g}"
    if bound is Bound.CAP:
        return f"max_total_tokens = {demand.max_total_tokens}"
    graphs = f", and CUDA graphs of {format_bytes(demand.graphs_bytes)}" if demand.graphs_bytes else ""
    return f"the activation peak of {format_bytes(demand.activation_peak_bytes)} (chunked_prefill_size){graphs}"


def _reason(bound: Bound, demand: MemoryDemand, remaining: int) -> str:
    left = format_bytes(remaining)
    if bound is Bound.FRACTION:
        return f"mem_fraction_static {demand.mem_fraction_static:g} of the {left} left after the weights"
    if bound is Bound.CAP:
        return f"max_total_tokens {demand.max_total_tokens}, and the padding page"
    kind = "estimated" if demand.peak_is_estimate else "measured"
    peak = format_bytes(demand.activation_peak_bytes)
    graphs = f" and CUDA graphs of {format_bytes(demand.graphs_bytes)}" if demand.graphs_bytes else ""
    return f"the {left} left after the weights, less the {kind} activation peak of {peak}{graphs}"

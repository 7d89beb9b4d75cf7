"""Plans the memory of a model on a device, without having either: what `radixfleet doctor --plan` tells.

The arithmetic is the worker's own (`worker.memory.plan`), fed from the model's configuration. Only the activation peak,
which a worker measures at start, is an estimate here (`worker.model.footprint`). What does not fit is answered with the
worker's own advice, and with what would fit: other formats, larger devices, several devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from deploy.doctor.devices import DEVICES, Device
from radixfleet.settings import format_bytes
from worker.core.graph_sizes import graph_sizes
from worker.memory.plan import (
    MemoryDemand,
    MemoryPlan,
    MemoryPlanError,
    chunked_prefill_size_for,
    max_running_requests_for,
    plan_memory,
)
from worker.model.configuration import ModelConfig, load_config
from worker.model.footprint import (
    FORMATS,
    ActivationEstimate,
    WeightFormat,
    estimate_activations,
    estimate_graphs,
    weights_bytes,
)
from worker.model.shapes import KNOWN_SHAPES

_USEFUL_CONTEXT = 8192
"""A KV pool that holds less than this, or than the context asked for, is not proposed."""
_SHARDS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is planned: a model in a format on a device, with a worker's settings (None: its defaults)."""

    model: str
    source: str
    """Where the shape is from."""
    config: ModelConfig
    weights: WeightFormat
    device: Device
    mem_fraction_static: float = 0.9
    page_size: int = 16
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    cuda_graphs: bool = True
    shards: int = 1
    """Devices that share the model by tensor parallelism: to tell how many it would take."""

    @property
    def context(self) -> int:
        """Longest prompt and completion together."""
        return self.context_length or self.config.usable_context_tokens

    @property
    def weights_bytes(self) -> int:
        """On each device."""
        return -(-weights_bytes(self.config, self.weights) // self.shards)

    @property
    def kv_bytes_per_token(self) -> int:
        """On each device."""
        return self.config.kv_bytes_per_token(self.weights.kv_bytes) // self.shards

    @property
    def chunk(self) -> int:
        """Prompt tokens in a step."""
        default = chunked_prefill_size_for(self.device.usable_bytes, on_cpu=False)
        return min(self.chunked_prefill_size or default, self.context)

    @property
    def rows(self) -> int:
        """Requests that run at once."""
        left = max(self.device.usable_bytes - self.weights_bytes, 0)
        kv_tokens = int(self.mem_fraction_static * left) // self.kv_bytes_per_token
        return self.max_running_requests or max_running_requests_for(kv_tokens, on_cpu=False)

    @property
    def activations(self) -> ActivationEstimate:
        """Of the largest step."""
        return estimate_activations(
            self.config,
            chunk=self.chunk,
            rows=self.rows,
            context=self.context,
            element_bytes=self.weights.kv_bytes,
        )

    @property
    def graphs_bytes(self) -> int:
        """CUDA graphs of steps of decodes, on each device."""
        if not self.cuda_graphs:
            return 0
        return estimate_graphs(self.config, rows=self.rows, element_bytes=self.weights.kv_bytes)

    def plan(self) -> MemoryPlan:
        """The three pools. Raises MemoryPlanError, with advice."""
        return plan_memory(
            MemoryDemand(
                device=self.device.name,
                total_bytes=self.device.usable_bytes,
                weights_bytes=self.weights_bytes,
                activation_peak_bytes=self.activations.total,
                graphs_bytes=self.graphs_bytes,
                kv_bytes_per_token=self.kv_bytes_per_token,
                page_size=self.page_size,
                mem_fraction_static=self.mem_fraction_static,
                min_context_tokens=self.context_length,
                peak_is_estimate=True,
            )
        )


def find_shape(model: str) -> tuple[str, ModelConfig]:
    """Source and shape of a known model, or of a directory, a config.json or a .gguf file.

    Raises ModelError, and ValueError when there is no such name and no such path.
    """
    known = KNOWN_SHAPES.get("smollm2-135m" if model == "demo" else model.lower())
    if known is not None:
        return f"{known.source} on Hugging Face", known.config
    path = Path(model)
    if not path.exists():
        raise ValueError(f"{model!r} is no path and no model known here; known are {', '.join(KNOWN_SHAPES)}")
    return str(path), load_config(path.parent if path.name == "config.json" else path)


def fits(wanted: Wanted) -> MemoryPlan | None:
    """The plan, if there is one with a useful KV pool."""
    try:
        plan = wanted.plan()
    except MemoryPlanError:
        return None
    enough = wanted.context_length or min(wanted.context, _USEFUL_CONTEXT)
    return plan if plan.kv_tokens >= enough else None


def explanation(wanted: Wanted) -> list[str]:
    """How each number comes about."""
    config, weights = wanted.config, wanted.weights
    on_each = f" on each of {wanted.shards} devices" if wanted.shards > 1 else ""
    lines = [
        f"weights: {config.num_parameters:,} parameters {_bytes_each(weights)} = {_both_units(wanted.weights_bytes)}"
        f"{on_each}",
        f"KV of a token: 2 (K and V) x {config.num_layers} layers x {config.num_kv_heads} KV heads x "
        f"{config.head_dim} x {weights.kv_bytes} bytes = {format_bytes(wanted.kv_bytes_per_token)}{on_each}",
    ]
    if wanted.weights_bytes < wanted.device.usable_bytes:
        lines.append(_activations(wanted))
        lines.append(_graphs(wanted))
    if wanted.device.reserved_bytes:
        lines.append(
            f"device: {_both_units(wanted.device.total_bytes)}, less {format_bytes(wanted.device.reserved_bytes)} for "
            "driver and CUDA context (estimate)"
        )
    if not weights.is_served:
        lines.append(f"this engine does not compute with {weights.name} weights: this is what they would take")
    return lines


def _activations(wanted: Wanted) -> str:
    parts = wanted.activations
    return (
        f"activations: {format_bytes(parts.total)} (estimate; a worker measures them at start): the larger of one "
        f"layer on {wanted.chunk:,} prompt tokens and {wanted.rows - 1} decodes, {format_bytes(parts.layer)}, and "
        f"sampling {wanted.rows} tokens of {wanted.config.vocab_size:,}, {format_bytes(parts.sampling)}; and the table "
        f"of KV slots, {format_bytes(parts.rows)}"
    )


def _graphs(wanted: Wanted) -> str:
    if not wanted.cuda_graphs:
        return "CUDA graphs: none (--no-cuda-graphs): each step is launched kernel by kernel, and decodes slower"
    return (
        f"CUDA graphs: {format_bytes(wanted.graphs_bytes)} (estimate; measured at start too) for steps of up to "
        f"{graph_sizes(wanted.rows)[-1]} decodes; --no-cuda-graphs does without"
    )


def _both_units(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes / 1e9:.1f} GB)" if num_bytes >= 1e9 else format_bytes(num_bytes)


def _bytes_each(weights: WeightFormat) -> str:
    others = weights.other_bits // 8
    if weights.linear_bits == weights.other_bits:
        return f"x {others} bytes"
    return f"at {weights.linear_bits:g} bits in the linear layers, {others} bytes in embedding, head and norms"


def alternatives(wanted: Wanted) -> Iterator[str]:
    """What would fit instead, nearest first: smaller formats here, the smallest larger device, several devices."""
    bits = wanted.weights.linear_bits
    for weights in FORMATS.values():
        plan = fits(replace(wanted, weights=weights)) if weights.linear_bits < bits else None
        if plan is not None:
            bits = weights.linear_bits
            unserved = "" if weights.is_served else "; this engine does not compute with it"
            yield f"{weights.name} on {wanted.device.name}: {_pools(plan)}{unserved}"
    larger = (each for each in DEVICES.values() if each.usable_bytes > wanted.device.usable_bytes)
    yield from islice(_fitting(wanted, ({"device": device} for device in larger)), 1)
    shardable = (shards for shards in _SHARDS if wanted.config.num_kv_heads % shards == 0)
    for text in islice(_fitting(wanted, ({"shards": shards} for shards in shardable)), 1):
        yield f"{text} on each; this engine has no tensor parallelism"


def _fitting(wanted: Wanted, changes: Iterable[dict[str, Any]]) -> Iterator[str]:
    for change in changes:
        changed = replace(wanted, **change)
        plan = fits(changed)
        if plan is not None:
            times = f"{changed.shards} x " if changed.shards > 1 else ""
            yield f"{changed.weights.name} on {times}{changed.device.name}: {_pools(plan)}"


def _pools(plan: MemoryPlan) -> str:
    return f"weights {format_bytes(plan.weights_bytes)}, KV {format_bytes(plan.kv_bytes)} for {plan.kv_tokens:,} tokens"


def capacity(wanted: Wanted, plan: MemoryPlan) -> str:
    """How many requests the KV pool holds at once."""
    lengths = sorted({min(2048, wanted.context), min(_USEFUL_CONTEXT, wanted.context), wanted.context})
    counts = ", ".join(f"{plan.kv_tokens / length:.1f} of {length:,}" for length in lengths)
    return f"requests at once by their length in tokens, without a shared prefix: {counts}"

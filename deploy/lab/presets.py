"""What simulated workers are made of: devices and models as published, and the step times that follow from them.

A step costs, by a roofline whose parts are added and not overlapped (so that it errs on the slow side):

    each step               reading the weights once           weights / (bandwidth x MEMORY_SHARE) + LAUNCH_S
    each token computed     two operations a parameter         2 x parameters / (operations/s x COMPUTE_SHARE)
    ... a prompt's, by the  attention to what came before      4 x layers x heads x head size
        tokens before it                                           / (operations/s x ATTENTION_SHARE)
    a decode, by the        reading its K and V                KV bytes / (bandwidth x MEMORY_SHARE)
        tokens before it

The shares are what well-tuned engines reach of the figures on the data sheets. Where a system was measured, its preset
has the measured numbers instead. The KV pool comes from the worker's own memory plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from radixfleet.types import Capacity
from worker.core.messages import Ready
from worker.memory.plan import MemoryDemand, chunked_prefill_size_for, plan_memory
from worker.runner.sim import CostModel

COMPUTE_SHARE = 0.5
ATTENTION_SHARE = 0.35
MEMORY_SHARE = 0.75
LAUNCH_S = 0.0008

PAGE_SIZE = 16
_GB = 1_000_000_000
_KV_TOKENS_PER_ROW = 512


@dataclass(frozen=True, slots=True)
class Model:
    """What a step computes and reads."""

    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    attention_operations: int
    """For each pair of a token and one that it attends to: 4 x layers x heads x head size."""
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator by its data sheet."""

    memory_bytes: int
    operations_per_s: float
    """Dense bfloat16."""
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Preset:
    """One kind of simulated worker."""

    name: str
    cost: CostModel
    ready: Ready
    """What its runner would say when it is ready: the sizes of its pools."""
    source: str

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.ready.capacity.kv_tokens

    def with_kv_tokens(self, kv_tokens: int) -> Preset:
        """The same with another KV pool, in whole pages."""
        kv_tokens = max(1, kv_tokens // PAGE_SIZE) * PAGE_SIZE
        rows = min(_rows(kv_tokens), self.ready.capacity.max_running_requests)
        capacity = replace(self.ready.capacity, kv_tokens=kv_tokens, max_running_requests=rows)
        context = min(self.ready.max_context_tokens, kv_tokens)
        return replace(self, ready=structs.replace(self.ready, capacity=capacity, max_context_tokens=context))


# Llama-3.1-8B: 32 layers, 32 heads, 8 of them for K and V, of size 128; bfloat16. (Its config.json.)
LLAMA_8B = Model(
    num_parameters=8_030_261_248,
    weights_bytes=16_060_522_496,
    kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
    attention_operations=4 * 32 * 32 * 128,
    max_context_tokens=131_072,
)
# SmolLM2-135M: 30 layers, 9 heads, 3 of them for K and V, of size 64; bfloat16. (Its config.json.)
SMOL_135M = Model(
    num_parameters=134_515_008,
    weights_bytes=269_030_016,
    kv_bytes_per_token=2 * 30 * 3 * 64 * 2,
    attention_operations=4 * 30 * 9 * 64,
    max_context_tokens=8_192,
)

# NVIDIA H100 Tensor Core GPU data sheet, SXM: 80 GB, 3.35 TB/s, 1,979 TFLOPS bfloat16 with sparsity, so half dense.
H100 = Device(80 * _GB, 989.5e12, 3.35e12)
# NVIDIA A100 80GB data sheet, SXM: 80 GB, 2,039 GB/s, 312 TFLOPS bfloat16 dense.
A100 = Device(80 * _GB, 312e12, 2.039e12)
# NVIDIA L4 data sheet: 24 GB, 300 GB/s, 242 TFLOPS bfloat16 with sparsity, so half dense.
L4 = Device(24 * _GB, 121e12, 300e9)


def _preset(name: str, device: Device, model: Model, source: str) -> Preset:
    memory_rate = device.bandwidth_bytes_per_s * MEMORY_SHARE
    token_s = 2 * model.num_parameters / (device.operations_per_s * COMPUTE_SHARE)
    cost = CostModel(
        step_s=model.weights_bytes / memory_rate + LAUNCH_S,
        prefill_token_s=token_s,
        decode_token_s=token_s,
        context_token_s=model.kv_bytes_per_token / memory_rate,
        prefill_context_token_s=model.attention_operations / (device.operations_per_s * ATTENTION_SHARE),
    )
    return Preset(name, cost, _ready(name, device.memory_bytes, model), source)


def _ready(name: str, memory_bytes: int, model: Model, max_rows: int = 256) -> Ready:
    plan = plan_memory(
        MemoryDemand(
            device=name,
            total_bytes=memory_bytes,
            weights_bytes=model.weights_bytes,
            # About what an 8 B model's largest step holds; the operator's share is what bounds the pool.
            activation_peak_bytes=memory_bytes // 40,
            kv_bytes_per_token=model.kv_bytes_per_token,
            page_size=PAGE_SIZE,
        )
    )
    return Ready(
        capacity=Capacity(
            kv_tokens=plan.kv_tokens,
            page_size=PAGE_SIZE,
            max_running_requests=min(_rows(plan.kv_tokens), max_rows),
            chunked_prefill_size=chunked_prefill_size_for(memory_bytes, on_cpu=False),
        ),
        memory=plan.pools(),
        num_parameters=model.num_parameters,
        dtype="bfloat16",
        max_context_tokens=min(model.max_context_tokens, plan.kv_tokens),
    )


def _rows(kv_tokens: int) -> int:
    """As the torch runner derives it, which has at most 256 on a GPU and 32 on a CPU."""
    return max(kv_tokens // _KV_TOKENS_PER_ROW, 1)


def _cpu() -> Preset:
    # Two cores with AVX-512 bfloat16, as the torch runner was measured there: 1,550 prompt tokens/s at 512 and 1,080 at
    # 2,048; decode steps of 8 ms alone, 15 ms for 8 and 33 ms for 32 of 256 tokens, 27 ms for 8 of 1,024.
    cost = CostModel(
        step_s=0.0075,
        prefill_token_s=5.5e-4,
        decode_token_s=3.5e-4,
        context_token_s=2e-6,
        prefill_context_token_s=3.7e-7,
    )
    return Preset(
        "cpu-135m", cost, _ready("cpu-135m", 4 * _GB, SMOL_135M, max_rows=32), "measured on two cores of a server CPU"
    )


_PRESETS = (
    _preset("h100-8b", H100, LLAMA_8B, "NVIDIA H100 SXM data sheet, Llama-3.1-8B in bfloat16"),
    _preset("a100-8b", A100, LLAMA_8B, "NVIDIA A100 80GB SXM data sheet, Llama-3.1-8B in bfloat16"),
    _preset("l4-8b", L4, LLAMA_8B, "NVIDIA L4 data sheet, Llama-3.1-8B in bfloat16"),
    _cpu(),
)

PRESETS = {preset.name: preset for preset in _PRESETS}
"""By name; the default first."""

"""What this machine gives a worker: facts, what follows from them, and advice. `radixfleet doctor` prints it."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from deploy.machine import load_of_others, num_cores
from radixfleet.settings import format_bytes
from worker.memory.plan import chunked_prefill_size_for
from worker.model.configuration import ModelConfig, load_config
from worker.model.linear import choose_linear_backend
from worker.model.shapes import KNOWN_SHAPES
from worker.runner.attention.backends import AttentionNeeds, choose_attention
from worker.runner.devices import DeviceError, choose_dtype, computes_bfloat16, open_device, usable_memory
from worker.runner.kernels.compiler import KernelsUnavailable
from worker.runner.kernels.layers import are_fast_for
from worker.runner.kernels.library import Kernels

_PACKAGES = ("radixfleet", "torch", "grpcio", "protobuf", "tokenizers", "numpy")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "bf16")
_USUAL = "llama-3.1-8b"
"""Whose attention stands for that of a model that was not named: heads of 128 elements."""
_FASTER_ATTENTION = {
    "triton": "a FlashAttention package that reads KV pages in place is faster: pip install vllm-flash-attn",
    "flash": "here K and V are gathered for it in each step: pip install 'radixfleet[gpu]' for Triton, which needs not",
    "sdpa": "expect a fraction of the GPU's speed: pip install 'radixfleet[gpu]' for Triton",
}
"""What to install, by the backend that is taken while another was passed by."""
_NO_BFLOAT16 = "this CPU has no instructions for bfloat16: with AMX, prompts are computed several times as fast"
_SMALL_POOL_REQUESTS = 4
"""A KV pool for fewer requests of full length than this is worth a word."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `advice` says what to change; empty when all is well."""

    topic: str
    fact: str
    advice: str = ""


def inspect(model: Path | None, device_name: str, device_memory: int | None) -> list[Finding]:
    """All findings, the machine's first. Raises DeviceError or ModelError when a name is wrong."""
    device = open_device(device_name)
    config = load_config(model) if model is not None else None
    shape = config or KNOWN_SHAPES[_USUAL].config
    kernels = _kernels()
    by_kernels = device.type == "cpu" and isinstance(kernels, Kernels) and are_fast_for(kernels, shape)
    dtype = choose_dtype(device, "auto", by_kernels=by_kernels)
    memory = usable_memory(device, device_memory)
    findings = [_versions(), _cpu(), *_gpus(), _threads(), _compiler(kernels), _memory()]
    findings += [
        Finding("device", f"{device}, {format_bytes(memory)} for one worker"),
        _dtype(device, dtype, by_kernels=by_kernels),
        *_attention(config, device, dtype),
        _chunk(device, memory),
    ]
    if model is not None and config is not None:
        findings += _model(config, model, dtype, memory)
    return findings


def as_objects(findings: list[Finding]) -> list[dict[str, Any]]:
    """For --json."""
    return [{"topic": f.topic, "fact": f.fact, "advice": f.advice} for f in findings]


def _versions() -> Finding:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return Finding("versions", f"Python {platform.python_version()}, {versions}")


def _cpu() -> Finding:
    capabilities = torch.cpu.get_capabilities()
    features = [name for name in _CPU_FEATURES if capabilities.get(name)]
    name = next((line for line in _cpuinfo("model name")), platform.processor() or platform.machine())
    return Finding("CPU", f"{name}, {num_cores()} cores, {', '.join(features) or 'no vector features that help'}")


def _cpuinfo(key: str) -> list[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        reason = "none that torch sees" if torch.version.cuda else "this torch is built without CUDA"
        has_card = any(Path("/dev").glob("nvidia[0-9]*"))
        advice = "there is a card: install a CUDA build of torch, and check the driver" if has_card else ""
        return [Finding("GPU", reason, advice)]
    findings = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        busy = "another process uses much of it" if free < total * 0.9 else ""
        text = f"cuda:{index} {torch.cuda.get_device_name(index)}, {format_bytes(free)} free of {format_bytes(total)}"
        findings.append(Finding("GPU", text, busy))
    return findings


def _threads() -> Finding:
    busy = (
        "other processes want the cores too: give workers fewer threads, since oversubscribed ones stall each other"
        if load_of_others() is not None
        else ""
    )
    load = psutil.getloadavg()[0]
    return Finding("threads", f"{num_cores()} for one worker, cores / workers for several; load {load:.1f}", busy)


def _kernels() -> Kernels | KernelsUnavailable:
    """Compiles them, as the first worker would."""
    try:
        return Kernels(1)
    except KernelsUnavailable as error:
        return error


def _compiler(kernels: Kernels | KernelsUnavailable) -> Finding:
    if isinstance(kernels, KernelsUnavailable):
        advice = f"{kernels.advice}: without kernels, steps on a CPU take two to five times as long"
        return Finding("kernels", f"none: {kernels}", advice)
    return Finding("kernels", f"attention, and whole steps in bfloat16, in C, using {kernels.features}")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    low = memory.available < memory.total // 4
    advice = "little is free: end what you do not need, or set --device-memory" if low else ""
    return Finding("memory", f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}", advice)


def _chunk(device: torch.device, memory: int) -> Finding:
    chunk = chunked_prefill_size_for(memory, on_cpu=device.type == "cpu")
    return Finding("chunk", f"chunked_prefill_size {chunk} by default")


def _dtype(device: torch.device, dtype: torch.dtype, *, by_kernels: bool) -> Finding:
    name = str(dtype).removeprefix("torch.")
    linears = "the kernels" if by_kernels else choose_linear_backend(device, dtype).name
    is_slow = device.type == "cpu" and not computes_bfloat16()
    return Finding("dtype", f"{name}, linear layers by {linears}", _NO_BFLOAT16 if is_slow else "")


def _attention(config: ModelConfig | None, device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """Which backend `--attention auto` takes on a GPU, and why not a faster one; `_compiler` says it for a CPU."""
    if device.type == "cpu":
        return []
    shape = config or KNOWN_SHAPES[_USUAL].config
    try:
        backend, passed_by = choose_attention("auto", None, AttentionNeeds(shape, device, dtype, page_size=16))
    except DeviceError as error:
        return [Finding("attention", f"none: {error}", "install a build of torch for this GPU, and check the driver")]
    reasons = "; ".join(f"not {name}: {why}" for name, why in passed_by.items())
    fact = f"{backend.name}, for heads of {shape.head_dim} in pages of 16{f' ({reasons})' if reasons else ''}"
    return [Finding("attention", fact, _FASTER_ATTENTION.get(backend.name, "") if passed_by else "")]


def _model(config: ModelConfig, path: Path, dtype: torch.dtype, memory: int) -> list[Finding]:
    weights = config.num_parameters * dtype.itemsize
    per_token = config.kv_bytes_per_token(dtype.itemsize)
    findings = [
        Finding(
            "model",
            f"{path.name}: {config.architecture}, {config.num_parameters / 1e6:.0f} M parameters, "
            f"context {config.usable_context_tokens}",
        ),
        Finding("weights", f"{format_bytes(weights)}; KV takes {format_bytes(per_token)} a token"),
    ]
    if weights >= memory:
        advice = "choose a smaller or quantized model, or a device with more memory; a lower fraction does not help"
        return [*findings, Finding("KV pool", f"none: the weights exceed {format_bytes(memory)}", advice)]
    tokens = int(0.9 * (memory - weights)) // per_token
    few = tokens < _SMALL_POOL_REQUESTS * config.usable_context_tokens
    advice = (
        f"fewer than {_SMALL_POOL_REQUESTS} requests of full length fit: more memory, or a lower --context-length"
        if few
        else ""
    )
    estimate = f"about {tokens} tokens at most; the worker measures its activations and says exactly"
    return [*findings, Finding("KV pool", estimate, advice)]

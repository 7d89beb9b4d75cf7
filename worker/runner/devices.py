"""What a device is and has: which dtype is fast on it, and how much of its memory a worker may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import structlog
import torch

from worker.runner.torch_config import Dtype

_log = structlog.get_logger()
_DEVICE_FILES = Path("/dev")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_AMPERE = (8, 0)
_WITHOUT_CUDA = "this torch is built without CUDA"


class DeviceError(ValueError):
    """The device that the settings name cannot be used; the message says what to change."""


def open_device(name: str) -> torch.device:
    """The device of a setting: "auto" (CUDA where torch sees a device, else the CPU), "cpu", "cuda" or "cuda:1".

    Raises DeviceError.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is no device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"devices of type {device.type} are not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = f"torch sees {torch.cuda.device_count()} CUDA devices" if torch.version.cuda else _WITHOUT_CUDA
        raise DeviceError(f"there is no device {name}: {seen}; use cpu, or see radixfleet doctor")
    return device


def warn_of_idle_gpu() -> None:
    """ "auto" has become the CPU: say so where the machine has a GPU, which is rarely what was meant."""
    if any(_DEVICE_FILES.glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        why = "its driver does not answer, or is too old" if torch.version.cuda else _WITHOUT_CUDA
        _log.warning("computing on the CPU, though there is a GPU: radixfleet doctor says more", why=why)


def make_current(device: torch.device) -> None:
    """Have this thread compute there: Triton launches kernels on the current device, wherever their tensors are, and
    pinned memory is that device's, which would otherwise set up the first GPU for it.
    """
    if device.index is not None:  # else it means the current one
        torch.cuda.set_device(device)


def choose_dtype(device: torch.device, setting: Dtype, *, by_kernels: bool) -> torch.dtype:
    """The dtype of a setting; "auto" is bfloat16 where that is the fastest.

    On GPUs that is Ampere and later; older ones get float16. On CPUs, where they have instructions for it, or where the
    kernels in C compute whole steps (`by_kernels`): on one with AVX2 alone they decode 3 to 5 times as fast as torch in
    float32, and compute prompts at least as fast; AVX512 and NEON alone are taken to be alike, and were not measured.
    Torch itself is faster with float32 on all of these.
    """
    if setting != "auto":
        dtype = getattr(torch, setting)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= _AMPERE else torch.float16
    return torch.bfloat16 if by_kernels or computes_bfloat16() else torch.float32


def computes_bfloat16() -> bool:
    """The CPU has instructions for it."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def usable_memory(device: torch.device, setting: int | None) -> int:
    """Bytes of the device that the worker may use: the setting, or what is free on a GPU, or half of a CPU's memory.

    Half, because a CPU's memory is shared with all else that runs on the machine; several workers on one machine should
    each be given their share. A container's limit counts as the machine's memory. Call it before anything is loaded.
    """
    if setting is not None:
        return setting
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().total, _container_limit()) // 2


def reachable_memory(device: torch.device, *, kept_bytes: int) -> int | None:
    """Bytes of a GPU that this process has or can still get: what torch's allocator holds, and what nobody does.

    But not what libraries have taken of the allocator's for good, as cuBLAS does for each stream: all that is in use
    and not among the caller's `kept_bytes`. None for a CPU, whose memory is not handed out for good.
    """
    if device.type != "cuda":
        return None
    lost_bytes = max(torch.cuda.memory_allocated(device) - kept_bytes, 0)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - lost_bytes


def num_processors(device: torch.device) -> int:
    """Units that compute blocks of a kernel side by side."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


def _container_limit() -> int:
    try:
        return int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # no cgroup, or the word "max"
        return psutil.virtual_memory().total

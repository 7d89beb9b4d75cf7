"""Tells running out of memory from other failures of torch, and makes advice of it.

Allocators say it in their own ways: CUDA's by an exception of its own, a CPU's by a RuntimeError with a text, libraries
(cuBLAS) by a status, numpy and Python by a MemoryError.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from worker.core.out_of_memory import OutOfMemory
from worker.memory.advisor import Bound, Shortage, Stage, advise
from worker.memory.plan import MemoryPlanError

_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "MemoryAllocation")
_ASKED = re.compile(r"allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was all that was missing."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def shortage_of(error: BaseException, device: torch.device, *, in_sampling: bool = False) -> OutOfMemory:
    """The numbers of a failed allocation, as far as they can be had. Call it before caches are released."""
    return OutOfMemory(_asked_for(error), _free_bytes(device), in_sampling)


def release_cached(device: torch.device) -> None:
    """Give back to the device what allocators keep for reuse: the next, smaller step may want it cut otherwise.

    No reference to a failed step's tensors, nor to its exception, should be left.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        with suppress(AttributeError, OSError):  # no glibc
            ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def advised(stage: Stage, bound: Bound, device: torch.device) -> Iterator[None]:
    """While loading: turn running out of memory into MemoryPlanError with the advice of that row."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        shortage = shortage_of(error, device)
        advice = advise(stage, Shortage(shortage.needed_bytes, shortage.free_bytes, bound))
        raise MemoryPlanError(advice) from error


def _asked_for(error: BaseException) -> int | None:
    match = _ASKED.search(str(error))
    return round(float(match[1]) * _UNITS[match[2]]) if match is not None else None


def _free_bytes(device: torch.device) -> int | None:
    """What the device has free, what torch keeps of it for reuse included."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    with suppress(RuntimeError):  # a device that is that short may fail at this too
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return None

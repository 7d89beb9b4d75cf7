from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch

from worker.memory.advisor import Bound, Stage
from worker.memory.plan import MemoryPlanError
from worker.runner.memory_errors import advised, is_out_of_memory, release_cached, shortage_of

CPU = torch.device("cpu")
MIB = 1 << 20

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free. Process 1 has 78.00 GiB memory in use."
)


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), 2560 * MIB),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 bytes."), 512),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to "
                      "allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"), 1 << 42),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (MemoryError(), None),
    ],
)  # fmt: skip
def test_every_allocator_is_understood(error: Exception, needed: int | None) -> None:
    assert is_out_of_memory(error)
    shortage = shortage_of(error, CPU, in_sampling=True)
    assert shortage.needed_bytes == needed
    assert shortage.in_sampling
    assert shortage.free_bytes is not None
    assert 0 < shortage.free_bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
        IndexError("index 3 is out of bounds"),
    ],
)
def test_other_failures_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_what_allocators_here_really_raise() -> None:
    with pytest.raises(RuntimeError) as torch_failed:
        torch.empty(1 << 50)
    assert is_out_of_memory(torch_failed.value)
    assert shortage_of(torch_failed.value, CPU).needed_bytes == 1 << 52
    with pytest.raises(MemoryError) as numpy_failed:
        np.empty(1 << 45, dtype=np.float64)
    assert is_out_of_memory(numpy_failed.value)


def test_while_loading_it_becomes_advice() -> None:
    """Behaviour 62: the stage is named, with its numbers."""
    with (
        pytest.raises(MemoryPlanError, match=r"while the weights were read: it asked for 2\.50 GiB and") as failed,
        advised(Stage.LOAD, Bound.ALLOCATION, CPU),
    ):
        raise torch.OutOfMemoryError(CUDA_TEXT)
    assert failed.value.advice.setting == "device_memory"
    with pytest.raises(ValueError, match="another matter"), advised(Stage.LOAD, Bound.ALLOCATION, CPU):
        raise ValueError("another matter")
    with pytest.raises(RuntimeError, match="shapes"), advised(Stage.LOAD, Bound.ALLOCATION, CPU):
        raise RuntimeError("shapes do not match")


def test_caches_can_be_released_at_any_time() -> None:
    release_cached(CPU)

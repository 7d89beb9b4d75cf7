"""Measures the most memory that a piece of torch code holds at once.

On a GPU the allocator knows. A CPU's allocator does not, and the process's resident size says little (freed memory
stays with it), so there every tensor that an operator returns is watched until its storage is freed. Scratch memory
inside an operator is not seen; the operators in use keep theirs small (torch's memory profiler agrees to 0.1 %).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def activation_peak(device: torch.device, compute: Callable[[], object]) -> int:
    """Bytes that `compute()` allocates and holds at its worst moment, what it returns included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    live = LiveBytes()
    with live:
        compute()
    return live.peak


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, sums the storages that operators made and that are still alive."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: guarding against the compiler, which is not used here, would import it, and that takes seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        """The largest sum so far, in bytes."""
        self._now = 0
        self._watched: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and watch what it returns."""
        inputs = {_storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _has_storage(leaf) and _storage_key(leaf) not in inputs | self._watched:
                self._watch(leaf)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage_key(tensor)
        num_bytes = storage.nbytes()
        self._watched.add(key)
        self._now += num_bytes
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._freed, key, num_bytes)

    def _freed(self, key: int, num_bytes: int) -> None:
        self._watched.discard(key)
        self._now -= num_bytes


def _has_storage(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.untyped_storage().nbytes() > 0


def _storage_key(tensor: torch.Tensor) -> int:
    """The address of the data: unique among living storages."""
    return tensor.untyped_storage().data_ptr()

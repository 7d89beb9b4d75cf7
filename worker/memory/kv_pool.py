"""The keys and values themselves: slot -> K and V of every layer.

Imported by runners only: the rest of this package has no torch.

    slot = page * page_size + offset
    [0, page_size)                    page 0, the padding sink: zeros, read where a gather is padded, never handed out
    [page_size, num_pages * size)     pages that `PageAllocator` gives to requests and the radix cache

One tensor for K and one for V a layer, each [num_slots, num_kv_heads, head_dim]: a single tensor over all layers makes
kernels copy, and slices of it are no longer dense. On a CPU memory is not touched until it is written (a large pool
costs nothing until it fills), so slots hold garbage before their first write. On a GPU they hold zeros: other people's
kernels multiply what lies behind a sequence in its last page by 0, and what a process before left there may be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Where K and V of a step's tokens are kept, of one layer."""

    keys: Tensor
    """The layer's pool, [num_slots, num_kv_heads, head_dim]; `values` alike."""
    values: Tensor
    slots: Tensor
    """int64 [num_tokens]"""

    def write(self, k: Tensor, v: Tensor) -> None:
        """Stores K and V, [num_tokens, num_kv_heads, head_dim] each."""
        self.keys.index_copy_(0, self.slots, k)
        self.values.index_copy_(0, self.slots, v)


class TokenToKVPool:
    """Owns the KV tensors of one device."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_pages` includes the padding sink."""
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages * page_size, num_kv_heads, head_dim)
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.keys = [make(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [make(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.clear_sink()

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, whether touched or not."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def clear_sink(self) -> None:
        """Make the padding sink zeros again, after steps that were only tried."""
        for tensor in (*self.keys, *self.values):
            tensor[: self.page_size].zero_()

    def place(self, layer: int, slots: Tensor) -> KvPlace:
        """Where a layer's K and V of the tokens at `slots`, int64 [num_tokens], are kept."""
        return KvPlace(self.keys[layer], self.values[layer], slots)

"""The keys and values themselves: slot -> K and V of every layer.

Imported by runners only: the rest of this package has no torch.

    slot = page * page_size + offset
    [0, page_size)                    page 0, the padding sink: zeros, read where a gather is padded, never handed out
    [page_size, num_pages * size)     pages that `PageAllocator` gives to requests and the radix cache

One tensor for K and one for V a layer, each [num_slots, num_kv_heads, head_dim]: a single tensor over all layers makes
kernels copy, and slices of it are no longer dense. Memory is not touched until it is written (on a CPU a large pool
costs nothing until it fills), so slots hold garbage before their first write.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.clear_sink()

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, whether touched or not."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def clear_sink(self) -> None:
        """Make the padding sink zeros again, after steps that were only tried."""
        for tensor in (*self.keys, *self.values):
            tensor[: self.page_size].zero_()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores K and V [num_tokens, num_kv_heads, head_dim] of one layer; `slots` is int64 [num_tokens]."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

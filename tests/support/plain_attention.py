"""Attention for a batch that is one sequence from its beginning: nothing is paged."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.memory.kv_pool import KvPlace
from worker.model.configuration import ModelConfig


class CausalAttention:
    """Implements `worker.model.llama.Attention`. Token i is kept in slot i."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: torch.dtype = torch.float32) -> None:
        shape = (num_tokens, config.num_kv_heads, config.head_dim)
        self._place = KvPlace(
            torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype), torch.arange(num_tokens)
        )

    def place(self, layer: int) -> KvPlace:
        """The same for all layers: what one has kept, the next one does not need."""
        return self._place

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """See `worker.model.llama.Attention`."""
        groups = q.shape[1] // self._place.keys.shape[1]
        k, v = (each.repeat_interleave(groups, dim=1) for each in (self._place.keys, self._place.values))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).tril() == 0, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

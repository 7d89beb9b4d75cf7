"""Attention for a batch that is one sequence from its beginning: nothing is kept, nothing is paged."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `worker.model.llama.Attention`."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).tril() == 0, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

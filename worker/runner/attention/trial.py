"""Attention is tried on a GPU before it is chosen: a small batch, against attention in its plainest form.

A package that was built for another torch, CUDA or generation of GPUs may well import, and fail when it is called, as
Triton does where no C compiler is found. Better a line about it, and the next backend, than a worker that cannot start.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.core.step import Int32Array
from worker.model.configuration import ModelConfig
from worker.runner.attention.protocol import AttentionBackend, AttentionBatch

_MOST_DIFFERENCE = 0.05
"""Of a token's result from the plain one, relative: roundings make a tenth of it, a wrong page or mask far more."""


class TrialFailed(Exception):
    """The backend cannot be called here, or computes something else; the message says what."""


@torch.inference_mode()
def try_attention(
    backend: AttentionBackend, config: ModelConfig, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A prompt, a decode and a chunk on a prefix, over pages in no order. Raises TrialFailed."""
    starts, lengths = np.array([0, page_size + 3, 20], np.int32), np.array([5, 1, 7], np.int32)
    table, num_slots = _table(starts + lengths, page_size)
    shapes = (
        (int(lengths.sum()), config.num_heads),
        (num_slots, config.num_kv_heads),
        (num_slots, config.num_kv_heads),
    )
    generator = torch.Generator().manual_seed(1)
    q, keys, values = (torch.randn(*shape, config.head_dim, generator=generator).to(dtype) for shape in shapes)
    batch = AttentionBatch(np.arange(3, dtype=np.int32), starts, lengths, torch.from_numpy(table).to(device))
    try:
        backend.plan(batch)
        attended = backend.attend(q.to(device), keys.to(device), values.to(device)).cpu()
    except Exception as error:  # packages and compilers fail as they like
        raise TrialFailed(f"its trial failed: {type(error).__name__}: {_first_line(error)}") from error
    expected = _plain(q, keys, values, batch, table)
    difference = float(((attended.float() - expected).norm(dim=1) / expected.norm(dim=1)).max())
    if not difference < _MOST_DIFFERENCE:
        raise TrialFailed(f"its trial gave another result, off by {difference:.2g} of it")


def _table(ends: Int32Array, page_size: int) -> tuple[Int32Array, int]:
    """Slots of each position of each sequence, and how many slots there are: pages from the last to page 1."""
    pages_each = -(-int(ends.max()) // page_size)
    pages = np.arange(len(ends) * pages_each, 0, -1, dtype=np.int32).reshape(len(ends), pages_each)
    slots = pages[:, :, None] * page_size + np.arange(page_size, dtype=np.int32)
    return np.ascontiguousarray(slots.reshape(len(ends), -1)), (pages.size + 1) * page_size


def _plain(q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, table: Int32Array) -> Tensor:
    """Token by token, in float32 on the host: [num_tokens, num_heads * head_dim]."""
    group = q.shape[1] // keys.shape[1]
    tokens = []
    for row, first, start, length in zip(batch.rows, batch.offsets, batch.starts, batch.lengths, strict=True):
        for position in range(int(start), int(start + length)):
            slots = torch.from_numpy(table[row, : position + 1]).long()
            k, v = (each[slots].float().repeat_interleave(group, 1) for each in (keys, values))
            query = q[int(first) + position - int(start)].float() * q.shape[2] ** -0.5
            weights = torch.einsum("hd,chd->hc", query, k).softmax(-1)
            tokens.append(torch.einsum("hc,chd->hd", weights, v).flatten())
    return torch.stack(tokens)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

"""Attention is tried on a GPU before it is chosen: small batches, against attention in its plainest form.

A package that was built for another torch, CUDA or generation of GPUs may well import, and fail when it is called, as
Triton does where no C compiler is found. Better a line about it, and the next backend, than a worker that cannot start.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.core.arrays import Int32Array
from worker.memory.transfers import still_computes
from worker.model.configuration import ModelConfig
from worker.runner.attention.protocol import AttentionBackend, AttentionBatch, CompiledAttention

_MOST_DIFFERENCE = 0.05
"""Of a token's result from the plain one, relative: roundings make a tenth of it, a wrong page or mask far more."""
_LONG_CONTEXTS = (300, 600, 1100, 2100, 4200)
"""Our kernel splits them in 2, 4, 8, 16 and 32 on a GPU of 132 processors and 8 heads of keys."""


class TrialFailed(Exception):
    """The backend cannot be called here, or computes something else; the message says what."""


class DeviceLost(Exception):
    """The backend has left the device such that nothing more computes on it in this process; the message says how."""


@torch.inference_mode()
def try_attention(
    backend: AttentionBackend, config: ModelConfig, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A prompt, a decode and a chunk on a prefix together, then single decodes so long that their keys are split; over
    pages in no order. What is compiled is compiled before. Raises TrialFailed, DeviceLost.
    """
    try:
        if isinstance(backend, CompiledAttention):
            backend.compile(dtype, device)
        _try_batch(backend, config, page_size, dtype, device, [(0, 5), (page_size + 3, 1), (20, 7)])
        for context in _LONG_CONTEXTS:
            _try_batch(backend, config, page_size, dtype, device, [(context, 1)])
    except TrialFailed:
        raise
    except Exception as error:  # packages and compilers fail as they like
        what = f"its trial failed: {type(error).__name__}: {_first_line(error)}"
        raise (TrialFailed if still_computes(device) else DeviceLost)(what) from error


def _try_batch(
    backend: AttentionBackend,
    config: ModelConfig,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    sequences: list[tuple[int, int]],
) -> None:
    """Sequences by start and length."""
    starts, lengths = np.ascontiguousarray(np.array(sequences, np.int32).T)
    table, num_slots = _table(starts + lengths, page_size)
    shapes = (
        (int(lengths.sum()), config.num_heads),
        (num_slots, config.num_kv_heads),
        (num_slots, config.num_kv_heads),
    )
    generator = torch.Generator().manual_seed(1)
    q, keys, values = (torch.randn(*shape, config.head_dim, generator=generator).to(dtype) for shape in shapes)
    rows = np.arange(len(sequences), dtype=np.int32)
    batch = AttentionBatch(rows, starts, lengths, torch.from_numpy(table).to(device))
    backend.plan(batch)
    attended = backend.attend(q.to(device), keys.to(device), values.to(device)).cpu()
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

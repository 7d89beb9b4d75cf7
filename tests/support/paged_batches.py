"""Random batches over a paged KV pool, and attention over them in the plainest form, to compare backends with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.memory.kv_pool import TokenToKVPool
from worker.runner.attention.protocol import AttentionBatch


@dataclass(frozen=True)
class PagedCase:
    """One layer's worth of a step."""

    batch: AttentionBatch
    pool: TokenToKVPool
    q: Tensor
    """[num_tokens, num_heads, head_dim]"""


def make_case(
    sequences: list[tuple[int, int]],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """Sequences are (start, length). Pages are dealt out at random; rows are in random order.

    All that no sequence owns is poisoned: slots hold NaN, and table entries beyond a row's end point to them.
    """
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(start + length) // page_size) for start, length in sequences]
    num_pages = sum(needed) + 3
    pool = TokenToKVPool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device(device),
    )
    for tensor in (pool.keys[0], pool.values[0]):
        tensor[page_size:] = torch.nan
    pages = random.permutation(num_pages - 1) + 1
    longest = max(start + length for start, length in sequences)
    table = np.full((len(sequences) + 2, longest + 5), pages[-1] * page_size, np.int32)
    rows = random.permutation(len(table))[: len(sequences)].astype(np.int32)
    taken = 0
    for row, (start, length), count in zip(rows, sequences, needed, strict=True):
        slots = (pages[taken : taken + count, None] * page_size + np.arange(page_size)).ravel()[: start + length]
        taken += count
        table[row, : len(slots)] = slots
        for tensor in (pool.keys[0], pool.values[0]):
            values = torch.randn(len(slots), num_kv_heads, head_dim, generator=generator)
            tensor[torch.from_numpy(slots.astype(np.int64)).to(device)] = values.to(device, dtype)
    starts, lengths = np.array(sequences, np.int32).T
    num_tokens = int(lengths.sum())
    q = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(device, dtype)
    return PagedCase(AttentionBatch(rows, starts, lengths, torch.from_numpy(table).to(device)), pool, q)


def naive_attention(case: PagedCase) -> Tensor:
    """Each token by itself, in float64: [num_tokens, num_heads * head_dim] on the CPU."""
    batch, keys, values = case.batch, case.pool.keys[0].double().cpu(), case.pool.values[0].double().cpu()
    table, q = batch.table.cpu(), case.q.double().cpu()
    groups = q.shape[1] // keys.shape[1]
    rows = []
    for row, start, length in zip(batch.rows.tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        for position in range(start, start + length):
            slots = table[row, : position + 1].long()
            k = keys[slots].repeat_interleave(groups, dim=1)
            v = values[slots].repeat_interleave(groups, dim=1)
            scores = torch.einsum("hd,khd->hk", q[len(rows)], k) * q.shape[2] ** -0.5
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten())
    return torch.stack(rows)

"""An `AttentionBatch` as kernels for GPUs want it: on the device, with the page of each `page_size` positions.

    query_offsets   sequence i owns the flat rows [query_offsets[i], query_offsets[i + 1])
    ends            it attends over the positions [0, ends[i]); its new ones are the last of them
    pages           its positions [j * page_size, (j + 1) * page_size) lie in page pages[i, j] of the pool

All of it is copied from the batch, so the table may change while the step is computed. Beyond a sequence's last page a
row of `pages` holds what earlier requests left: valid pages, but not this sequence's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.memory.transfers import upload, upload_indices
from worker.runner.attention.protocol import AttentionBatch


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """See the module's docstring. All tensors are int32 and contiguous."""

    query_offsets: Tensor
    """[num_sequences + 1]"""
    ends: Tensor
    """[num_sequences]"""
    pages: Tensor
    """[num_sequences, pages of the longest]"""
    longest_query: int
    longest_end: int

    @classmethod
    def of(cls, batch: AttentionBatch, page_size: int) -> PagedBatch:
        """Copies what `batch` says."""
        device = batch.table.device
        longest_end = int(batch.ends.max())
        first_slots = batch.table[:, :longest_end:page_size]
        slots = first_slots.index_select(0, upload_indices(batch.rows, device))
        offsets = np.zeros(len(batch.lengths) + 1, np.int32)
        np.cumsum(batch.lengths, out=offsets[1:])
        return cls(
            query_offsets=upload(offsets, device),
            ends=upload(batch.ends, device),
            pages=slots // page_size,
            longest_query=int(batch.lengths.max()),
            longest_end=longest_end,
        )

    @classmethod
    def of_decodes(cls, rows: Tensor, positions: Tensor, table: Tensor, page_size: int) -> PagedBatch:
        """One new token a sequence, int64 [num_sequences] both, by operations of the device alone.

        `pages` and `longest_end` are those of the longest context that the table has room for.
        """
        count, device = len(rows), table.device
        return cls(
            query_offsets=torch.arange(count + 1, dtype=torch.int32, device=device),
            ends=(positions + 1).int(),
            pages=table[:, ::page_size].index_select(0, rows) // page_size,
            longest_query=1,
            longest_end=table.shape[1],
        )


def as_pages(pool: Tensor, page_size: int) -> Tensor:
    """A layer's K or V [num_slots, num_kv_heads, head_dim] as [num_pages, page_size, num_kv_heads, head_dim]."""
    return pool.view(-1, page_size, *pool.shape[1:])

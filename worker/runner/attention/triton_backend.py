"""Attention by our own Triton kernels, over the page table in place: any page size and head size, float32 and 16 bits.

decoding sequences    one block each; where they are too few to occupy the device, their keys are split
other sequences       blocks of some 64 rows, 32 in float32: as many tokens as there are rows for their heads
deterministic         all sequences in blocks of one shape, nothing split: see `triton_kernels`
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.core.arrays import Int32Array
from worker.memory.transfers import upload
from worker.model.configuration import ModelConfig
from worker.model.fused_ops import next_power_of_two
from worker.runner.attention.paged import PagedBatch
from worker.runner.attention.protocol import AttentionBatch
from worker.runner.attention.triton_kernels import attend_blocks, combine_splits
from worker.runner.devices import num_processors

_LEAST_ROWS = 16
"""Rows and columns of the smallest matrices that the kernels' products take."""
_MAX_SPLITS = 32
_LEAST_KEYS = 128
"""That make a split worth its while; half as many where a head has more than 128 elements."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """Blocks of one shape."""

    sequences: Tensor
    """int32 [num_blocks]"""
    firsts: Tensor
    num_blocks: int
    block_tokens: int
    block_rows: int
    num_splits: int


class TritonBackend:
    """Implements `AttentionBackend`. See the module's docstring."""

    name = "triton"

    def __init__(self, config: ModelConfig, page_size: int, dtype: torch.dtype, *, deterministic: bool) -> None:
        self._num_kv_heads = config.num_kv_heads
        self._group = config.num_heads // config.num_kv_heads
        self._head_dim = config.head_dim
        self._page_size = page_size
        self._dtype = dtype
        self._deterministic = deterministic
        self._batch: PagedBatch | None = None
        self._launches: list[_Launch] = []

    def plan(self, batch: AttentionBatch) -> None:
        """Cut the sequences into blocks."""
        self._batch = PagedBatch.of(batch, self._page_size)
        device = batch.table.device
        everything = np.arange(len(batch.lengths), dtype=np.int32)
        is_decode = np.zeros(len(everything), np.bool_) if self._deterministic else batch.lengths == 1
        decoding, others = everything[is_decode], everything[~is_decode]
        self._launches = []
        if len(others):
            self._launches.append(_cut(others, batch.lengths, *self._prompt_shape, device))
        if len(decoding):
            splits = self._num_splits(len(decoding), int(batch.ends[decoding].max()), device)
            self._launches.append(_cut(decoding, batch.lengths, *self._decode_shape, device, num_splits=splits))

    plans_on_device = True

    def plan_decodes(self, rows: Tensor, positions: Tensor, table: Tensor) -> None:
        """See `RecordableAttention`. Keys are split as those of the longest context are."""
        count, device = len(rows), table.device
        self._batch = PagedBatch.of_decodes(rows, positions, table, self._page_size)
        tokens, block_rows = self._prompt_shape if self._deterministic else self._decode_shape
        self._launches = [
            _Launch(
                sequences=torch.arange(count, dtype=torch.int32, device=device),
                firsts=torch.zeros(count, dtype=torch.int32, device=device),
                num_blocks=count,
                block_tokens=tokens,
                block_rows=block_rows,
                num_splits=1 if self._deterministic else self._num_splits(count, table.shape[1], device),
            )
        ]

    @property
    def _prompt_shape(self) -> tuple[int, int]:
        """Tokens and rows of a block."""
        rows = _tile_rows(self._head_dim, self._dtype)
        rows = next_power_of_two(max(min(rows, 32) if self._deterministic else rows, self._group))
        return rows // self._group, rows

    @property
    def _decode_shape(self) -> tuple[int, int]:
        return 1, next_power_of_two(max(_LEAST_ROWS, self._group))

    def _num_splits(self, num_sequences: int, longest: int, device: torch.device) -> int:
        """A power of two, as each number of splits is compiled for itself."""
        wanted = 2 * num_processors(device) // (num_sequences * self._num_kv_heads)
        possible = longest // (_LEAST_KEYS if self._head_dim <= 128 else _LEAST_KEYS // 2)
        return 1 << (max(1, min(wanted, possible, _MAX_SPLITS)).bit_length() - 1)

    def compile(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `CompiledAttention`: a block of each shape, and each number of splits that may come."""
        one = torch.ones(1, dtype=torch.int32, device=device)
        self._batch = PagedBatch(one.new_tensor([0, 1]), one, one.new_zeros((1, 1)), longest_query=1, longest_end=1)
        pool = torch.zeros((self._page_size, self._num_kv_heads, self._head_dim), dtype=dtype, device=device)
        num_heads = self._group * self._num_kv_heads
        # Strides are part of what is compiled: queries lie by themselves, or beside their keys (torch's rotation).
        layouts = [
            torch.zeros((1, num_heads + beside, self._head_dim), dtype=dtype, device=device)[:, :num_heads]
            for beside in (0, self._num_kv_heads)
        ]
        shapes = [(*self._prompt_shape, 1)]
        if not self._deterministic:
            most = self._num_splits(1, 1 << 30, device)
            shapes += [(*self._decode_shape, 1 << power) for power in range(most.bit_length())]
        for tokens, rows, num_splits in shapes:
            self._launches = [_Launch(one - 1, one - 1, 1, tokens, rows, num_splits)]
            for queries in layouts:
                self.attend(queries, pool, pool)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        for launch in self._launches:
            self._run(launch, q, keys, values, out)
        return out

    def _run(self, launch: _Launch, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        batch = self._batch
        assert batch is not None, "attend before plan"
        block_d = next_power_of_two(max(self._head_dim, _LEAST_ROWS))
        parts = (launch.num_blocks, q.shape[1], launch.num_splits) if launch.num_splits > 1 else (0, 0, 0)
        # Each by itself: a kernel is compiled anew for a tensor that begins at no multiple of 16 bytes.
        sums, maxima, totals = (
            torch.empty(size, dtype=torch.float32, device=q.device) for size in ((*parts, block_d), parts, parts)
        )
        attend_blocks[(launch.num_blocks, self._num_kv_heads, launch.num_splits)](
            q,
            keys,
            values,
            out,
            sums,
            maxima,
            totals,
            launch.sequences,
            launch.firsts,
            batch.query_offsets,
            batch.ends,
            batch.pages,
            batch.pages.stride(0),
            math.log2(math.e) / math.sqrt(self._head_dim),
            q.stride(0),
            q.stride(1),
            keys.stride(0),
            keys.stride(1),
            out.stride(0),
            HEAD_DIM=self._head_dim,
            BLOCK_D=block_d,
            GROUP=self._group,
            PAGE_SIZE=self._page_size,
            BLOCK_Q=launch.block_tokens,
            BLOCK_M=launch.block_rows,
            BLOCK_N=_tile_columns(self._head_dim, q.dtype),
            NUM_SPLITS=launch.num_splits,
            num_warps=4,
            num_stages=2,
        )
        if launch.num_splits > 1:
            combine_splits[(launch.num_blocks, q.shape[1])](
                sums,
                maxima,
                totals,
                out,
                launch.sequences,
                batch.query_offsets,
                out.stride(0),
                HEAD_DIM=self._head_dim,
                BLOCK_D=block_d,
                NUM_SPLITS=launch.num_splits,
            )


def _cut(
    sequences: Int32Array,
    lengths: Int32Array,
    block_tokens: int,
    block_rows: int,
    device: torch.device,
    *,
    num_splits: int = 1,
) -> _Launch:
    counts = -(-lengths[sequences] // block_tokens)
    before = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(before, counts)
    return _Launch(
        sequences=upload(np.repeat(sequences, counts), device),
        firsts=upload((within * block_tokens).astype(np.int32), device),
        num_blocks=len(within),
        block_tokens=block_tokens,
        block_rows=block_rows,
        num_splits=num_splits,
    )


def _tile_rows(head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a block: as many as registers hold the sums of. Without tensor cores, as in float32, products take
    registers as well: with twice the rows or columns, hundreds of bytes a thread go to memory and back.
    """
    if dtype == torch.float32:
        return 32 if head_dim <= 128 else 16
    return 64 if head_dim <= 128 else 32


def _tile_columns(head_dim: int, dtype: torch.dtype) -> int:
    """Keys in a tile: K and V of two tiles, and the block's queries, fit the shared memory of small GPUs. For float32
    see `_tile_rows`.
    """
    if dtype == torch.float32:
        return 32 if head_dim <= 64 else 16
    return 64 if head_dim <= 128 else 32

"""The reference backend: torch's scaled_dot_product_attention over gathered K and V. Any device, any dtype.

    decoding sequences    one new token each: grouped by length, K and V gathered into one padded tensor a group, all
    (length 1)            query heads that share a KV head as rows of one query (SDPA then reads each K and V once)
    other sequences       one by one, gathered once, in tiles of query rows: a tile sees only the keys up to its last
    (prefill)             token, so about half of what the mask hides is never computed

Padding reads slot 0 (zeros) and is masked. Gathers and masks are bounded by the constants below, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from worker.memory.transfers import upload_indices
from worker.runner.attention.protocol import AttentionBatch

_MAX_GATHERED_TOKENS = 65_536
"""Padded tokens in one gather of decoding sequences, unless a single one is longer."""
_MAX_PADDING = 2.0
"""The longest sequence of a group over its shortest."""
_TILE_ROWS = 512
_MAX_TILE_SCORES = 1 << 24
"""Query rows x keys of a tile: bounds the mask (and the scores, where SDPA keeps them)."""
_MIN_TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    tokens: Tensor
    """int64 [n]: rows of the flat batch."""
    slots: Tensor
    """int64 [n * longest], padded with slot 0."""
    mask: Tensor | None
    """bool [n, 1, 1, longest]; None where nothing is padded."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    first: int
    """First row in the flat batch."""
    start: int
    """Position of that row."""
    length: int
    slots: Tensor
    """int64 [start + length]."""


class SdpaBackend:
    """See the module's docstring."""

    name = "sdpa"

    def __init__(self, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._groups: list[_DecodeGroup] = []
        self._prefills: list[_Prefill] = []

    def plan(self, batch: AttentionBatch) -> None:
        """Group the decoding sequences and look up all slots."""
        offsets, ends = batch.offsets, batch.ends
        decoding = np.flatnonzero(batch.lengths == 1)
        by_length = decoding[np.argsort(-ends[decoding], kind="stable")]
        self._groups = [_decode_group(batch, members, offsets, ends) for members in _grouped(by_length, ends)]
        self._prefills = [
            _Prefill(
                first=int(offsets[i]),
                start=int(batch.starts[i]),
                length=int(batch.lengths[i]),
                slots=batch.table[int(batch.rows[i]), : int(ends[i])].long(),
            )
            for i in np.flatnonzero(batch.lengths > 1)
        ]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
        out = torch.empty_like(q)
        for group in self._groups:
            out.index_copy_(0, group.tokens, self._decode(group, q.index_select(0, group.tokens), keys, values))
        for prefill in self._prefills:
            k, v = keys.index_select(0, prefill.slots), values.index_select(0, prefill.slots)
            rows = slice(prefill.first, prefill.first + prefill.length)
            _attend_tiled(prefill.start, q[rows], k, v, out[rows])
        return out.flatten(1)

    def _decode(self, group: _DecodeGroup, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_sequences, num_heads, head_dim = q.shape
        shape = (num_sequences, -1, self._num_kv_heads, head_dim)
        attended = functional.scaled_dot_product_attention(
            q.view(num_sequences, self._num_kv_heads, num_heads // self._num_kv_heads, head_dim),
            keys.index_select(0, group.slots).view(shape).transpose(1, 2),
            values.index_select(0, group.slots).view(shape).transpose(1, 2),
            attn_mask=group.mask,
        )
        return attended.reshape(num_sequences, num_heads, head_dim)


def _grouped(by_length: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """Cuts indices, longest sequence first, where a group would be padded or gathered too much."""
    groups, begin = [], 0
    for index in range(1, len(by_length) + 1):
        longest = int(ends[by_length[begin]])
        full = (index - begin + 1) * longest > _MAX_GATHERED_TOKENS
        if index == len(by_length) or full or longest > _MAX_PADDING * int(ends[by_length[index]]):
            groups.append(by_length[begin:index])
            begin = index
    return groups


def _decode_group(batch: AttentionBatch, members: np.ndarray, offsets: np.ndarray, ends: np.ndarray) -> _DecodeGroup:
    device = batch.table.device
    lengths = upload_indices(ends[members], device)
    longest = int(ends[members[0]])
    slots = batch.table[upload_indices(batch.rows[members], device), :longest].long()
    mask = None
    if int(ends[members[-1]]) != longest:
        valid = torch.arange(longest, device=device) < lengths[:, None]
        slots = torch.where(valid, slots, 0)
        mask = valid[:, None, None, :]
    return _DecodeGroup(upload_indices(offsets[members], device), slots.flatten(), mask)


def _attend_tiled(start: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Writes the attention of q [length, heads, dim], whose first row is position `start`, over k and v [ends, ...]."""
    tile = max(_MIN_TILE_ROWS, min(_TILE_ROWS, _MAX_TILE_SCORES // len(k)))
    for begin in range(0, len(q), tile):
        end = min(begin + tile, len(q))
        visible = start + end
        whole = start + begin == 0  # the tile sees no key before its own: SDPA's causal form, without a mask
        attended = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1).unsqueeze(0),
            k[:visible].transpose(0, 1).unsqueeze(0),
            v[:visible].transpose(0, 1).unsqueeze(0),
            attn_mask=None if whole else _causal_mask(start + begin, visible, q.device),
            is_causal=whole,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)


def _causal_mask(first: int, visible: int, device: torch.device) -> Tensor:
    """bool [visible - first, visible]: row i is position first + i and sees the keys up to itself."""
    positions = torch.arange(visible, device=device)
    return positions[None, :] <= positions[first:, None]

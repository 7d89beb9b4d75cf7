"""scaled_dot_product_attention so that a token's result depends on its own sequence and position alone, to the bit.

How SDPA sums depends on all the shapes it is given. Here they follow from the position alone:

    tile       positions [i * _TILE_ROWS, (i + 1) * _TILE_ROWS) of one sequence: those computed in the step, in the
               places that their positions give them, and zeros in the other places
    keys       positions [0, end of the tile), padded to a multiple of _KEYS with slot 0 (zeros), and masked
    call       one tile of one sequence, with the query heads of a KV head as further rows

A token that is decoded, beside whatever else, and the same token in any chunk of a prompt so take part in calls of the
same shape at the same place, and every call treats its rows alike. That costs calls: half the speed, or less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from worker.runner.attention.protocol import AttentionBatch

_TILE_ROWS = 8
_KEYS = 64


@dataclass(frozen=True, slots=True)
class _Sequence:
    first: int
    """First row in the flat batch."""
    start: int
    """Position of that row."""
    length: int
    slots: Tensor
    """int64, padded to a multiple of _KEYS with slot 0."""

    @property
    def first_tile(self) -> int:
        return self.start // _TILE_ROWS

    @property
    def num_tiles(self) -> int:
        return (self.start + self.length - 1) // _TILE_ROWS + 1 - self.first_tile


class FixedShapesBackend:
    """See the module's docstring."""

    name = "sdpa"

    def __init__(self, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._sequences: list[_Sequence] = []
        self._mask = torch.empty(0, 0)
        """[group * _TILE_ROWS, 2 * n]: row i of a tile sees column j if j <= n + i. A window of it masks any tile."""

    def plan(self, batch: AttentionBatch) -> None:
        """Look up all slots."""
        self._sequences = []
        for row, first, start, length in zip(batch.rows, batch.offsets, batch.starts, batch.lengths, strict=True):
            end = int(start + length)
            slots = functional.pad(batch.table[int(row), :end].long(), (0, _round_up(end, _KEYS) - end))
            self._sequences.append(_Sequence(int(first), int(start), int(length), slots))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
        out = torch.empty_like(q)
        for sequence in self._sequences:
            rows = slice(sequence.first, sequence.first + sequence.length)
            k, v = keys.index_select(0, sequence.slots), values.index_select(0, sequence.slots)
            out[rows] = self._attend(sequence, q[rows], k, v)
        return out.flatten(1)

    def _attend(self, sequence: _Sequence, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [length, num_heads, head_dim], k and v [padded end, num_kv_heads, head_dim] -> as q."""
        num_heads, head_dim = q.shape[1:]
        kv_heads, group = self._num_kv_heads, num_heads // self._num_kv_heads
        tiles = q.new_zeros(sequence.num_tiles * _TILE_ROWS, kv_heads, group, head_dim)
        before = sequence.start % _TILE_ROWS
        own = slice(before, before + sequence.length)
        tiles[own] = q.view(len(q), kv_heads, group, head_dim)
        folded = tiles.view(-1, _TILE_ROWS, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(-1, kv_heads, group * _TILE_ROWS, head_dim)
        attended = torch.cat(list(self._attend_tiles(sequence.first_tile, folded, k, v)))
        unfolded = attended.view(-1, kv_heads, group, _TILE_ROWS, head_dim).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(-1, num_heads, head_dim)[own]

    def _attend_tiles(self, first_tile: int, tiles: Tensor, k: Tensor, v: Tensor) -> Iterator[Tensor]:
        for index in range(len(tiles)):
            position = (first_tile + index) * _TILE_ROWS
            visible = _round_up(position + _TILE_ROWS, _KEYS)
            yield functional.scaled_dot_product_attention(
                tiles[index : index + 1],
                k[:visible].transpose(0, 1).unsqueeze(0),
                v[:visible].transpose(0, 1).unsqueeze(0),
                attn_mask=self._masked(position, visible, tiles),
            )

    def _masked(self, position: int, visible: int, tiles: Tensor) -> Tensor:
        """0 where a row of the tile that begins at `position` sees a key, else -inf: [rows of a tile, visible]."""
        widest = self._mask.shape[1] // 2
        if widest < visible or self._mask.dtype != tiles.dtype:
            widest = max(visible, 2 * widest)
            rows = torch.arange(tiles.shape[2], device=tiles.device) % _TILE_ROWS
            hidden = torch.arange(2 * widest, device=tiles.device) > widest + rows[:, None]
            self._mask = torch.zeros(hidden.shape, dtype=tiles.dtype, device=tiles.device)
            self._mask.masked_fill_(hidden, -torch.inf)
        return self._mask[:, widest - position : widest - position + visible]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple

"""Layers that compute each row alike, to the last bit, whatever other rows are in the batch.

Floating-point sums depend on their order, and libraries choose that by the number of rows: MKL and oneDNN have one
kernel for a single row, another for a few, a third for many. So rows are given to them in numbers that are known to be
summed alike:

    tile of _TILE_ROWS rows          the reference
    other numbers in _ROW_COUNTS     used where they give the tile's bits, which is tried out when a layer is made
    n rows                           cut into the largest such numbers; what is left is padded to one

Elementwise functions have a trap of their own: torch cuts them among threads at any element, and computes what is left
of a vector at a cut by other code, with other last bits for exp.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import torch
import torch.nn.functional as functional
from torch import Tensor

from worker.model.linear import Linear, LinearBackend

_log = structlog.get_logger()

_ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TILE_ROWS = 32
_MAX_PRODUCTS = 1 << 32
"""Multiplications in trying a number of rows: larger ones are not tried, because loading should not take minutes."""
_ALIGNMENT_BYTES = 64
"""MKL's results may depend on whether its input is aligned."""
_UNCUT_ELEMENTS = 32_768
"""torch never cuts an elementwise function over at most so many elements among threads (its grain size)."""


class RowInvariantBackend:
    """Another backend's layers, used so that rows do not depend on their batch."""

    def __init__(self, inner: LinearBackend) -> None:
        self._inner = inner
        self._row_counts: dict[tuple[object, ...], tuple[int, ...]] = {}

    @property
    def name(self) -> str:
        """For logs."""
        return f"{self._inner.name}, row-invariant"

    @property
    def shares_weight(self) -> bool:
        """Whether the backend within shares the weight."""
        return self._inner.shares_weight

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer with the given weight. The first of each shape takes the time of a few hundred rows to try out."""
        key = (weight.shape, weight.dtype, weight.device, bias is None)
        if key not in self._row_counts:
            self._row_counts[key] = equal_row_counts(self._inner, weight, bias)
        return RowInvariantLinear(self._inner.prepare(weight, bias), self._row_counts[key])


class RowInvariantLinear:
    """A layer that is called with certain numbers of rows only, all of which give the same bits."""

    def __init__(self, linear: Linear, row_counts: tuple[int, ...]) -> None:
        """`row_counts` ascends."""
        self._linear = linear
        self._row_counts = row_counts
        self.nbytes = linear.nbytes

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        x = x.contiguous()
        parts = [self._compute(x[begin : begin + count], padded) for begin, count, padded in self._cut(len(x))]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._linear(x)

    def _compute(self, rows: Tensor, padded: int) -> Tensor:
        if len(rows) < padded:
            return self._linear(functional.pad(rows, (0, 0, 0, padded - len(rows))))[: len(rows)]
        return self._linear(rows.clone() if rows.data_ptr() % _ALIGNMENT_BYTES else rows)

    def _cut(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """(first row, rows, rows to pad them to)."""
        begin = 0
        for count in reversed(self._row_counts):
            while count >= min(_TILE_ROWS, self._row_counts[-1]) and num_rows - begin >= count:
                yield begin, count, count
                begin += count
        if begin < num_rows:
            left = num_rows - begin
            yield begin, left, next(count for count in self._row_counts if count >= left)


def equal_row_counts(backend: LinearBackend, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """The numbers of rows, ascending, with which a backend's layers of this shape give each row the same bits.

    The layer that is tried has a weight [b, -b] and is given rows [a, a], its columns shuffled: the exact result is 0,
    so all that comes out is the rounding of the sums, and shows their order.
    """
    generator = torch.Generator().manual_seed(0)
    out_features, in_features = weight.shape
    columns = torch.randperm(in_features, generator=generator)
    half = in_features // 2

    def mirrored(num_rows: int, sign: int) -> Tensor:
        values = torch.randn(num_rows, half, generator=generator)
        rows = torch.cat((values, sign * values, torch.zeros(num_rows, in_features - 2 * half)), dim=1)
        return rows[:, columns].to(weight.device, weight.dtype)

    affordable = [count for count in _ROW_COUNTS if count <= max(_TILE_ROWS, _MAX_PRODUCTS // weight.numel())]
    layer = backend.prepare(mirrored(out_features, -1), None if bias is None else torch.zeros_like(bias))
    x = mirrored(affordable[-1], 1)
    moved = x.roll(1, 0)
    expected = torch.cat([layer(tile) for tile in torch.split(x, _TILE_ROWS)])
    if not torch.equal(torch.cat([layer(tile) for tile in torch.split(moved, _TILE_ROWS)]), expected.roll(1, 0)):
        _log.warning(
            "rows of a linear layer depend on each other here, so each is computed by itself, which is slow",
            linear=backend.name,
            shape=tuple(weight.shape),
        )
        return (1,)
    return tuple(
        count
        for count in affordable
        if torch.equal(layer(x[:count]), expected[:count])
        and torch.equal(layer(moved[:count]), expected.roll(1, 0)[:count])
    )


def row_invariant_silu(gate: Tensor) -> Tensor:
    """silu of [num_tokens, size], so that no row is cut among threads.

    Rows that lie apart, as those of a chunk of wider rows do, are computed one by one within a call; of rows that lie
    side by side, `size` must be a multiple of 64.
    """
    rows = max(1, _UNCUT_ELEMENTS // gate.shape[1])
    return torch.cat([functional.silu(part) for part in torch.split(gate, rows)])

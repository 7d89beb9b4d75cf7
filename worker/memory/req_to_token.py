"""Request row and position to KV slot: the first of three levels (row -> slot -> tensor). Owned by the engine's thread.

    table[row, position]        the slot that holds K and V of the request's token at `position`
    table[row, computed:]       rubbish of the row's earlier users: readers know each row's length

A row belongs to one request from `take_row` to `release_row`; whoever releases it knows that no launched step reads it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.core.step import Int32Array
from worker.memory.page_allocator import PageError


class ReqToTokenPool:
    """Rows of slots, one for each running request."""

    def __init__(self, max_rows: int, max_context: int) -> None:
        """Memory: max_rows * max_context * 4 bytes of address space, touched only as far as rows are written."""
        self.max_rows = max_rows
        self.max_context = max_context
        self.table: Int32Array = np.zeros((max_rows, max_context), dtype=np.int32)
        """int32 [max_rows, max_context]."""
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._taken = np.zeros(max_rows, dtype=np.bool_)

    @property
    def free_rows(self) -> int:
        """Rows that nobody has."""
        return len(self._free_rows)

    def take_row(self) -> int | None:
        """A row for a new request; None when all are taken."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._taken[row] = True
        return row

    def release_row(self, row: int) -> None:
        """Give a row back. Raises PageError when it is not taken."""
        self._check_taken(row)
        self._taken[row] = False
        self._free_rows.append(row)

    def write(self, row: int, start: int, slots: Int32Array) -> None:
        """Set positions [start, start + len(slots)) of a taken row."""
        self._check_span(row, start, start + len(slots))
        self.table[row, start : start + len(slots)] = slots

    def write_each(self, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], slots: Int32Array) -> None:
        """Set positions [starts[i], starts[i] + n) of the taken row rows[i] to slots[i], for int32 [len(rows), n]."""
        if not len(rows):
            return
        width = slots.shape[1]
        if not self._taken[rows].all():
            raise PageError("a row is not taken")
        if starts.min() < 0 or starts.max() + width > self.max_context:
            raise PageError(
                f"positions {starts.min()}..{starts.max() + width} are outside the context of {self.max_context} tokens"
            )
        self.table[rows[:, None], starts[:, None] + np.arange(width)] = slots

    def slots(self, row: int, start: int, end: int) -> Int32Array:
        """Slots of positions [start, end) of a taken row: a view, so copy it to keep it."""
        self._check_span(row, start, end)
        return self.table[row, start:end]

    def _check_taken(self, row: int) -> None:
        if not (0 <= row < self.max_rows and self._taken[row]):
            raise PageError(f"row {row} is not taken")

    def _check_span(self, row: int, start: int, end: int) -> None:
        self._check_taken(row)
        if not 0 <= start <= end <= self.max_context:
            raise PageError(
                f"positions {start}..{end} of row {row} are outside the context of {self.max_context} tokens"
            )

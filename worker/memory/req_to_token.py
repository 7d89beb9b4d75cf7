"""Request row and position to KV slot: the first of three levels (row -> slot -> tensor). Owned by the engine's thread.

A row names pages, because slots come in whole pages: sixteen times fewer numbers to write, read and hand on.

    pages[row, position // page_size]      the page that holds K and V of the request's token at `position`, ...
    page * page_size + position % page_size    ... and its slot there
    pages[row, behind what is taken]       rubbish of the row's earlier users: readers know each row's length

A row belongs to one request from `take_row` to `release_row`; whoever releases it knows that no launched step reads it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.core.arrays import Int32Array
from worker.memory.page_allocator import PageError, pages_for, slots_of


class ReqToTokenPool:
    """Rows of pages, one for each running request."""

    def __init__(self, max_rows: int, max_context: int, page_size: int) -> None:
        """Memory: 4 bytes a page of address space, touched only as far as rows are written."""
        self.max_rows = max_rows
        self.max_pages = pages_for(max_context, page_size)
        self.page_size = page_size
        self.pages: Int32Array = np.zeros((max_rows, self.max_pages), dtype=np.int32)
        """int32 [max_rows, max_pages]."""
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

    def write(self, row: int, first: int, pages: Int32Array) -> None:
        """Set pages [first, first + len(pages)) of a taken row."""
        self._check_span(row, first, first + len(pages))
        self.pages[row, first : first + len(pages)] = pages

    def write_each(self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], pages: Int32Array) -> None:
        """Set page places[i] of the taken row rows[i] to pages[i]."""
        if not len(rows):
            return
        # Counted, which takes numpy a third of what its methods any, all, min and max take.
        if np.count_nonzero(self._taken[rows]) != len(rows):
            raise PageError("a row is not taken")
        if np.count_nonzero((places < 0) | (places >= self.max_pages)):
            raise PageError(f"pages {places.min()}..{places.max()} are outside a context of {self.max_pages} pages")
        self.pages[rows, places] = pages

    def pages_between(self, row: int, first: int, end: int) -> Int32Array:
        """Pages [first, end) of a taken row: a view, so copy it to keep it."""
        self._check_span(row, first, end)
        return self.pages[row, first:end]

    def slots(self, row: int, start: int, end: int) -> Int32Array:
        """Slots of positions [start, end) of a taken row, made anew."""
        first = start // self.page_size
        pages = self.pages_between(row, first, pages_for(end, self.page_size))
        return slots_of(pages, self.page_size)[start - first * self.page_size : end - first * self.page_size]

    def slots_at(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Int32Array:
        """The slot of position positions[i] of the taken row rows[i]."""
        places = positions // self.page_size
        slots = positions + (self.pages[rows, places] - places) * self.page_size
        return slots.astype(np.int32)

    def _check_taken(self, row: int) -> None:
        if not (0 <= row < self.max_rows and self._taken[row]):
            raise PageError(f"row {row} is not taken")

    def _check_span(self, row: int, first: int, end: int) -> None:
        self._check_taken(row)
        if not 0 <= first <= end <= self.max_pages:
            raise PageError(f"pages {first}..{end} of row {row} are outside a context of {self.max_pages} pages")

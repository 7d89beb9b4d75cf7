"""What requests hold of the worker's memory, from admission to release: a row, a locked prefix, pages of their own.

    positions   0 ............. handle.length ............. allocated           both whole pages
                the radix cache's, locked    the request's own
    duplicates  own pages of positions before handle.length that the cache holds another copy of

A request's row of `ReqToTokenPool` is written once for each position and never changed: a runner learns slots from
plans alone. So where two requests computed the same tokens at once, the second reads its own copy (`duplicates`) to
its end, at the price of those pages until then. Pages pass from the request to the cache by `keep`, as soon as their
KV is known to be there and not at launch: a launched step can still fail, and then nobody may find what it should
have written.

Taking is all or nothing: `open` and `grow` change nothing when there are too few pages. What is taken comes from the
free list, then from evictable prefixes. `release` is called by the scheduler's `_retire` and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from worker.core.step import Int32Array
from worker.memory.page_allocator import PageAllocator, pages_for, pages_of, slots_of
from worker.memory.radix_cache import Handle, RadixCache
from worker.memory.req_to_token import ReqToTokenPool
from worker.scheduling.rows import RowIndex, Rows


@dataclass(slots=True, eq=False)
class Holding:
    """What one request holds. See the map above."""

    rows: Rows
    row: int
    handle: Handle
    matched: int
    """Tokens found in the cache at admission."""
    duplicates: list[Int32Array] = field(default_factory=list)

    @property
    def allocated(self) -> int:
        """Positions that have a slot."""
        return int(self.rows.allocated[self.row])


class Holdings:
    """The three pools' books, seen from requests."""

    def __init__(self, allocator: PageAllocator, table: ReqToTokenPool, cache: RadixCache) -> None:
        self.allocator = allocator
        self.table = table
        self.cache = cache
        self.page_size = allocator.page_size
        self.rows = Rows(table.max_rows)

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free ones and evictable ones."""
        return self.cache.available_pages

    @property
    def used_pages(self) -> int:
        """Pages that cannot be had now: locked in the cache, or requests' own."""
        return self.allocator.total_pages - self.available_pages

    def open(self, handle: Handle, prefix_slots: Int32Array, num_tokens: int) -> Holding | None:
        """Take a row, and pages for positions [len(prefix_slots), num_tokens); the rest of the first is `handle`'s.

        None, with nothing changed, when there is no row or there are too few pages; `handle` stays the caller's then.
        """
        matched = len(prefix_slots)
        row = self.table.take_row()
        if row is None:
            return None
        pages = self.cache.allocate(pages_for(num_tokens - matched, self.page_size))
        if pages is None:
            self.table.release_row(row)
            return None
        self.table.write(row, 0, prefix_slots)
        self.table.write(row, matched, slots_of(pages, self.page_size))
        self.rows.clear(row)
        self.rows.allocated[row] = matched + len(pages) * self.page_size
        self.rows.own_pages[row] = len(pages)
        return Holding(self.rows, row, handle, matched)

    def grow(self, rows: RowIndex) -> bool:
        """One page more for each of `rows`, all different; False, with nothing changed, when there are too few."""
        pages = self.cache.allocate(len(rows))
        if pages is None:
            return False
        slots = slots_of(pages, self.page_size).reshape(-1, self.page_size)
        self.table.write_each(rows, self.rows.allocated[rows], slots)
        self.rows.allocated[rows] += self.page_size
        self.rows.own_pages[rows] += 1
        return True

    def keep(self, holding: Holding, tokens: Int32Array) -> None:
        """Let the cache have the whole pages of `tokens`, the request's tokens from position 0 whose KV is there."""
        inserted = self.cache.insert(holding.handle, tokens, self.table.slots(holding.row, 0, len(tokens)))
        if len(inserted.duplicate_pages):
            holding.duplicates.append(inserted.duplicate_pages)
        self.rows.own_pages[holding.row] -= len(inserted.pages) - len(inserted.duplicate_pages)

    def release(self, holding: Holding) -> None:
        """Give everything back. No launched step may read or write any of it any more."""
        own = self.own_pages(holding)
        self.cache.unlock(holding.handle)
        self.allocator.free(own)
        self.table.release_row(holding.row)
        self.rows.clear(holding.row)

    def own_pages(self, holding: Holding) -> Int32Array:
        """The pages that are the request's own: duplicates, and what lies behind the cached prefix."""
        tail = self.table.slots(holding.row, holding.handle.length, holding.allocated)
        return np.concatenate([*holding.duplicates, pages_of(tail, self.page_size)])

    def num_own_pages(self, holding: Holding) -> int:
        """How many `own_pages` are."""
        return int(self.rows.own_pages[holding.row])

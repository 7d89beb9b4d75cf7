"""What requests hold of the worker's memory, from admission to release: a row, a locked prefix, pages of their own.

    positions   0 ............. handle.length ............. allocated           both whole pages
                the radix cache's, locked    the request's own
    duplicates  own pages of positions before handle.length that the cache holds another copy of

A request's row of `ReqToTokenPool` is written once for each position and never changed: a runner learns slots from
plans alone. So whoever computes what the cache gets from another, or has already (the last page of a prompt that is
cached whole, all of one whose log probabilities are asked for), reads its own copy (`duplicates`) to its end, at the
price of those pages until then; or, where it needs a page and has the pool to itself, until `exchange_duplicates`.
Pages pass from the request to the cache by `keep`, as soon as their KV is known to be there and not at launch: a
launched step can still fail, and then nobody may find what it should have written.

Taking is all or nothing: `open` and `grow` change nothing when there are too few pages. What is taken comes from the
free list, then from evictable prefixes. `open` only promises pages, and `provide` takes those of all that were opened
since: one eviction a step instead of one a request. `release` is called by the scheduler's `_retire` and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from worker.core.arrays import Int32Array
from worker.memory.cached_prefix import Handle
from worker.memory.page_allocator import PageAllocator, pages_for
from worker.memory.radix_cache import RadixCache
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
    entries: memoryview = field(init=False)
    """The entries of the request's row in all columns of `Rows`."""

    def __post_init__(self) -> None:
        self.entries = self.rows.entries(self.row)

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
        self._promised: list[tuple[int, Int32Array, int]] = []
        """(row, pages of its prefix, pages that are to follow them)."""
        self._num_promised = 0

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free ones and evictable ones that nobody was promised."""
        return self.cache.available_pages - self._num_promised

    @property
    def used_pages(self) -> int:
        """Pages that cannot be had now: locked in the cache, or requests' own."""
        return self.allocator.total_pages - self.available_pages

    def open(self, handle: Handle, prefix_pages: Int32Array, num_tokens: int) -> Holding | None:
        """Take a row, and pages for what of `num_tokens` positions is behind `prefix_pages`, which are `handle`'s.

        None, with nothing changed, when there is no row or there are too few pages; `handle` stays the caller's then.
        The row names its pages once `provide` was called.
        """
        num_pages = pages_for(num_tokens, self.page_size) - len(prefix_pages)
        row = self.table.take_row() if num_pages <= self.available_pages else None
        if row is None:
            return None
        self._promised.append((row, prefix_pages, num_pages))
        self._num_promised += num_pages
        self.rows.clear(row)
        self.rows.allocated[row] = (len(prefix_pages) + num_pages) * self.page_size
        self.rows.own_pages[row] = num_pages
        return Holding(self.rows, row, handle, len(prefix_pages) * self.page_size)

    def provide(self) -> None:
        """Take the pages that were promised, all at once."""
        if not self._promised:
            return
        pages = self.cache.allocate(self._num_promised)
        assert pages is not None, "what is promised can be had"
        for row, prefix_pages, num_pages in self._promised:
            self.table.write(row, 0, np.concatenate([prefix_pages, pages[:num_pages]]))
            pages = pages[num_pages:]
        self._promised.clear()
        self._num_promised = 0

    def grow(self, rows: RowIndex) -> bool:
        """One page more for each of `rows`, all different; False, with nothing changed, when there are too few."""
        pages = self.cache.allocate(len(rows))
        if pages is None:
            return False
        self.table.write_each(rows, self.rows.allocated[rows] // self.page_size, pages)
        self.rows.allocated[rows] += self.page_size
        self.rows.own_pages[rows] += 1
        return True

    def keep(self, holding: Holding, tokens: Int32Array) -> None:
        """Let the cache have the whole pages of `tokens`, the request's tokens from position 0 whose KV is there."""
        pages = self.table.pages_between(holding.row, 0, pages_for(len(tokens), self.page_size))
        inserted = self.cache.insert(holding.handle, tokens, pages)
        if len(inserted.duplicate_pages):
            holding.duplicates.append(inserted.duplicate_pages)
        self.rows.own_pages[holding.row] -= len(inserted.pages) - len(inserted.duplicate_pages)

    def exchange_duplicates(self, holding: Holding) -> None:
        """The cache's copies that nobody else holds are freed, and it has the request's in their place."""
        if not holding.duplicates:
            return
        pages = self.table.pages_between(holding.row, 0, holding.handle.length // self.page_size)
        taken = self.cache.exchange(holding.handle, pages)
        holding.duplicates = [np.setdiff1d(np.concatenate(holding.duplicates), taken)]
        self.rows.own_pages[holding.row] -= len(taken)

    def release(self, holding: Holding, *, forget: bool = False) -> None:
        """Give everything back. No launched step may read or write any of it any more.

        `forget`: the cache is not to keep its prefix for others, see `RadixCache.forget`.
        """
        own = self.own_pages(holding)
        if forget:
            self.cache.forget(holding.handle, holding.matched)
        else:
            self.cache.unlock(holding.handle)
        self.allocator.free(own)
        self.table.release_row(holding.row)
        self.rows.clear(holding.row)

    def own_pages(self, holding: Holding) -> Int32Array:
        """The pages that are the request's own: duplicates, and what lies behind the cached prefix."""
        first, end = holding.handle.length // self.page_size, holding.allocated // self.page_size
        return np.concatenate([*holding.duplicates, self.table.pages_between(holding.row, first, end)])

    def pages_released_by(self, holding: Holding) -> int:
        """Pages that can be had once it is released: its own, and what it alone has locked in the cache."""
        return self.num_own_pages(holding) + self.cache.pages_released_by(holding.handle)

    def num_own_pages(self, holding: Holding) -> int:
        """How many `own_pages` are."""
        return int(self.rows.own_pages[holding.row])

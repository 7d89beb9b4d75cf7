"""Who has which page of the KV pool. Owned by the engine's thread; no locks.

The KV pool is cut into pages of `page_size` slots: page p is slots [p * page_size, (p + 1) * page_size).

    page 0                  the padding sink: kernels may write rubbish there; never handed out
    pages [1, num_pages)    either on the free list, or handed out to exactly one owner (a request or the radix cache)

The free list is a stack, so the pages freed last, whose memory is warm, are used first. What is freed is checked before
the list is touched: a page that is out of bounds, free already or given twice raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from worker.core.arrays import Int32Array
from worker.memory.portions import Portions

PADDING_PAGE = 0
"""The page whose slots the padded entries of a step write to. Nothing reads it, and no request owns it."""


_CHECKED_AT_ONCE = 65_536
_FEW = 8


class PageError(AssertionError):
    """The books of pages, rows or locks would be broken: a fault of the caller, raised before anything is changed."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens take when they begin at a page boundary."""
    return -(-num_tokens // page_size)


def slots_of(pages: Int32Array, page_size: int) -> Int32Array:
    """The slots of `pages` [n], in order: int32 [n * page_size]."""
    offsets = np.arange(page_size, dtype=np.int32)
    return ((pages * np.int32(page_size))[:, None] + offsets).ravel()


class PageAllocator:
    """Hands out pages, all or nothing, and takes them back."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """`num_pages` counts the padding sink, so it is the size of the KV pool in pages and at least 2."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a KV pool needs two pages or more of one slot or more, not {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # Highest first, so that the first pages handed out are 1, 2, 3, ...
        self._stack = np.arange(num_pages - 1, PADDING_PAGE, -1, dtype=np.int32)
        self._num_free = num_pages - 1
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._is_free[PADDING_PAGE] = False

    @property
    def total_pages(self) -> int:
        """Pages that can be handed out: all but the padding sink."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages on the free list."""
        return self._num_free

    def allocate(self, num_pages: int) -> Int32Array | None:
        """`num_pages` pages, int32, now the caller's; None, and nothing is taken, when fewer are free. O(num_pages)."""
        if num_pages < 0:
            raise PageError(f"cannot allocate {num_pages} pages")
        if num_pages > self._num_free:
            return None
        self._num_free -= num_pages
        pages = self._stack[self._num_free : self._num_free + num_pages][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: npt.NDArray[np.integer]) -> None:
        """Take back `pages` [n], which the caller owned. O(n log n), of which a sort of integers is the least part.

        Raises PageError, with nothing changed, if any of them may not be freed.
        """
        count = len(pages)
        if count > _FEW or not self._are_freeable(pages.tolist()):
            self._check_freeable(pages)
        # Reversed, as `allocate` reverses again: pages freed together come back in the order they had.
        self._stack[self._num_free : self._num_free + count] = pages[::-1]
        self._num_free += count
        self._is_free[pages] = True

    def is_free(self, pages: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of `pages` are on the free list."""
        free: npt.NDArray[np.bool_] = self._is_free[pages]
        return free

    def check(self) -> None:
        """Verify every invariant; raises PageError. O(num_pages)."""
        for _ in self.checks(Portions()):
            pass

    def checks(self, portions: Portions) -> Iterator[None]:
        """The same in portions: nothing may change between them."""
        marked = np.count_nonzero(self._is_free)
        for begin in range(0, self._num_free, _CHECKED_AT_ONCE):
            if not self._is_free[self._stack[begin : min(begin + _CHECKED_AT_ONCE, self._num_free)]].all():
                raise PageError("the free list and the marks of free pages disagree")
            if portions.spend(_CHECKED_AT_ONCE // 16):
                yield
        if marked != self._num_free:
            raise PageError("the free list and the marks of free pages disagree")
        if self._is_free[PADDING_PAGE]:
            raise PageError("the padding sink is on the free list")

    def _are_freeable(self, pages: list[int]) -> bool:
        """The same answer as `_check_freeable`, sooner for a few of them: what a request has at its end."""
        in_use = all(PADDING_PAGE < page < self.num_pages and not self._is_free[page] for page in pages)
        return in_use and len(set(pages)) == len(pages)

    def _check_freeable(self, pages: npt.NDArray[np.integer]) -> None:
        if not len(pages):
            return
        ordered = np.sort(pages)
        low, high = int(ordered[0]), int(ordered[-1])
        if low <= PADDING_PAGE or high >= self.num_pages:
            raise PageError(f"freed pages {low}..{high} are not all in 1..{self.num_pages - 1}")
        freed_already = self._is_free[ordered]
        if np.count_nonzero(freed_already):
            raise PageError(f"page {int(ordered[freed_already][0])} is freed twice")
        repeated = ordered[1:] == ordered[:-1]
        if np.count_nonzero(repeated):
            raise PageError(f"page {int(ordered[1:][repeated][0])} is freed twice in one call")

"""A request as the radix cache sees one: it matches, locks, computes, inserts, ends, and knows which pages it owns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker.core.arrays import Int32Array
from worker.memory.cached_prefix import Inserted, Match
from worker.memory.page_allocator import PageAllocator, pages_for
from worker.memory.radix_cache import RadixCache


def int32(tokens: Sequence[int] | Int32Array) -> Int32Array:
    return np.array(tokens, dtype=np.int32)


class CachedSequence:
    """Owns what it allocated until the tree takes it over; `end` (or `abort`) gives the rest back."""

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        tokens: Sequence[int] | Int32Array,
        namespace: tuple[str, ...] = ("model",),
    ) -> None:
        self.cache = cache
        self.allocator = allocator
        self.tokens = int32(tokens)
        self.match: Match = cache.match(namespace, self.tokens, limit=max(len(self.tokens) - 1, 0))
        self.handle = cache.lock(self.match)
        self.pages = self.match.pages
        self.computed = self.match.length
        self.own: set[int] = set()
        """Pages handed to this sequence that neither the tree nor the allocator has taken."""

    @property
    def cached(self) -> int:
        return self.match.length

    def compute(self, num_tokens: int | None = None) -> bool:
        """Pages for `num_tokens` tokens more, by default for all; False, and nothing changes, when they do not fit."""
        end = len(self.tokens) if num_tokens is None else min(self.computed + num_tokens, len(self.tokens))
        pages = self.cache.allocate(pages_for(end, self.cache.page_size) - len(self.pages))
        if pages is None:
            return False
        self.own.update(pages.tolist())
        self.pages = np.concatenate([self.pages, pages])
        self.computed = end
        return True

    def insert(self) -> Inserted:
        first = self.handle.length // self.cache.page_size
        inserted = self.cache.insert(self.handle, self.tokens[: self.computed], self.pages)
        given = self.pages[first : self.handle.length // self.cache.page_size]
        self.own -= set(given.tolist()) - set(inserted.duplicate_pages.tolist())
        return inserted

    def adopt(self, inserted: Inserted) -> None:
        """Read the tree's pages from now on, and free the duplicates, which no step is reading."""
        first = inserted.start // self.cache.page_size
        self.pages[first : first + len(inserted.pages)] = inserted.pages
        self.allocator.free(inserted.duplicate_pages)
        self.own -= set(inserted.duplicate_pages.tolist())

    def end(self) -> None:
        self.insert()
        self.abort()

    def abort(self, *, forget: bool = False) -> None:
        self.allocator.free(int32(sorted(self.own)))
        self.own.clear()
        if forget:
            self.cache.forget(self.handle, self.cached)
        else:
            self.cache.unlock(self.handle)

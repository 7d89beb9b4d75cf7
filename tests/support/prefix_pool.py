"""A page allocator with its radix cache, and shorthands for tests."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.cached_sequence import CachedSequence, int32
from worker.memory.page_allocator import PageAllocator
from worker.memory.radix_cache import RadixCache

NAMESPACE = ("model",)


class Pool:
    """An allocator with its cache, and shorthands."""

    def __init__(self, page_size: int = 4, num_pages: int = 101) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.cache = RadixCache(self.allocator)

    def sequence(self, tokens: Sequence[int], namespace: tuple[str, ...] = NAMESPACE) -> CachedSequence:
        return CachedSequence(self.cache, self.allocator, tokens, namespace)

    def put(self, tokens: Sequence[int], namespace: tuple[str, ...] = NAMESPACE) -> None:
        """A sequence computed, cached and ended."""
        sequence = self.sequence(tokens, namespace)
        assert sequence.compute()
        sequence.end()

    def cached(self, tokens: Sequence[int], namespace: tuple[str, ...] = NAMESPACE) -> int:
        return self.cache.match(namespace, int32(tokens)).length

    def check(self) -> None:
        self.cache.check()
        self.allocator.check()

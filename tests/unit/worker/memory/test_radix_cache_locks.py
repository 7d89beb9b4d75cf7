"""What a lock protects."""

from __future__ import annotations

import pytest

from tests.support.cached_sequence import int32
from tests.support.prefix_pool import NAMESPACE, Pool
from worker.memory.page_allocator import PageError


class TestLocks:
    def test_a_lock_covers_the_handles_own_node(self, pool: Pool) -> None:
        """Behaviour 24: a lock covers the handle's own node; a locked node is never evicted."""
        pool.put(range(12))
        pool.put([*range(8), 50, 51, 52, 53])
        handle = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(12))))
        assert handle.length == 12
        assert pool.cache.protected_pages == 3
        assert pool.cache.evict(100) == 1
        assert pool.cached(range(12)) == 12
        assert pool.cached([*range(8), 50, 51, 52, 53]) == 8
        pool.check()
        pool.cache.unlock(handle)
        assert pool.cache.evict(100) == 3

    def test_a_lock_covers_no_more_than_what_was_matched(self, pool: Pool) -> None:
        pool.put(range(40))
        handle = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(40)), limit=9))
        assert handle.length == 8
        assert (pool.cache.protected_pages, pool.cache.evictable_pages) == (2, 8)
        assert pool.cache.evict(100) == 8
        assert pool.cached(range(40)) == 8
        pool.cache.unlock(handle)

    def test_a_handle_survives_the_split_of_its_node(self, pool: Pool) -> None:
        """Behaviour 24: after a split the lower part keeps the lock and the new parent has the same."""
        pool.put(range(16))
        low = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(16))))
        high = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(8))))
        assert (low.length, high.length) == (16, 8)
        assert pool.cache.evict(100) == 0
        pool.cache.unlock(high)
        assert pool.cache.protected_pages == 4
        pool.cache.unlock(low)
        assert pool.cache.evictable_pages == 4

    def test_the_upper_lock_outlives_the_lower(self, pool: Pool) -> None:
        pool.put(range(16))
        low = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(16))))
        high = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(8))))
        pool.cache.unlock(low)
        assert pool.cache.evict(100) == 2
        assert pool.cached(range(16)) == 8
        pool.cache.unlock(high)

    def test_two_handles_at_one_node_count_twice(self, pool: Pool) -> None:
        pool.put(range(8))
        first, second = (pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(8)))) for _ in range(2))
        pool.cache.unlock(first)
        assert pool.cache.evict(100) == 0
        pool.cache.unlock(second)
        assert pool.cache.evict(100) == 2

    def test_a_handle_is_unlocked_once(self, pool: Pool) -> None:
        pool.put(range(8))
        first, second = (pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(8)))) for _ in range(2))
        pool.cache.unlock(first)
        with pytest.raises(PageError, match="unlocked already"):
            pool.cache.unlock(first)
        assert pool.cache.protected_pages == 2
        pool.cache.unlock(second)

    def test_a_match_made_before_a_split_can_still_be_locked(self, pool: Pool) -> None:
        pool.put(range(16))
        early = pool.cache.match(NAMESPACE, int32(range(7)))
        whole = pool.cache.match(NAMESPACE, int32(range(16)))
        middle = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(8))))
        handles = [pool.cache.lock(early), pool.cache.lock(whole)]
        assert [handle.length for handle in handles] == [4, 16]
        for handle in [middle, *handles]:
            pool.cache.unlock(handle)

    @pytest.mark.parametrize("evicted", [1, 4])
    def test_a_match_that_was_evicted_cannot_be_locked(self, pool: Pool, evicted: int) -> None:
        pool.put(range(16))
        match = pool.cache.match(NAMESPACE, int32(range(16)))
        pool.cache.evict(evicted)
        with pytest.raises(PageError, match="stale"):
            pool.cache.lock(match)

    def test_a_match_whose_node_was_split_and_then_evicted_cannot_be_locked(self, pool: Pool) -> None:
        pool.put(range(16))
        match = pool.cache.match(NAMESPACE, int32(range(4)))
        upper = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(8))))
        pool.cache.evict(2)
        with pytest.raises(PageError, match="stale"):
            pool.cache.lock(match)
        pool.check()
        pool.cache.unlock(upper)

    def test_an_empty_match_can_be_locked_and_protects_nothing(self, pool: Pool) -> None:
        handle = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(8))))
        assert handle.length == 0
        assert pool.cache.protected_pages == 0
        pool.check()
        pool.cache.unlock(handle)

"""What leaves the radix cache, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.cached_sequence import int32
from tests.support.prefix_pool import NAMESPACE, Pool


class TestEviction:
    def test_least_recently_used_goes_first(self, pool: Pool) -> None:
        pool.put(range(8))
        pool.put(range(100, 108))
        pool.put(range(200, 208))
        pool.put(range(8))
        assert pool.cache.evict(2) == 2
        assert [pool.cached(range(start, start + 8)) for start in (0, 100, 200)] == [8, 0, 8]
        assert pool.cache.evict(2) == 2
        assert [pool.cached(range(start, start + 8)) for start in (0, 100, 200)] == [8, 0, 0]

    def test_matching_alone_is_no_use(self, pool: Pool) -> None:
        pool.put(range(8))
        pool.put(range(100, 108))
        pool.cached(range(8))
        pool.cache.evict(2)
        assert pool.cached(range(8)) == 0

    def test_a_leaf_is_trimmed_from_its_tail(self, pool: Pool) -> None:
        pool.put(range(80))
        assert pool.cache.evict(3) == 3
        assert pool.cached(range(80)) == 68
        pool.check()
        fork = pool.sequence([*range(68), 500, 501, 502, 503])
        assert fork.cached == 68
        assert fork.compute()
        fork.end()
        assert pool.cached([*range(68), 500, 501, 502, 503]) == 72

    def test_a_prefix_outlives_all_that_hangs_below_it(self, pool: Pool) -> None:
        pool.put(range(8))
        for tail in (100, 200, 300):
            pool.put([*range(8), *range(tail, tail + 8)])
        lengths = []
        while pool.cache.evict(1):
            pool.check()
            lengths.append([pool.cached([*range(8), *range(tail, tail + 8)]) for tail in (100, 200, 300)])
        assert lengths == [
            [12, 16, 16],
            [8, 16, 16],
            [8, 12, 16],
            [8, 8, 16],
            [8, 8, 12],
            [8, 8, 8],
            [4, 4, 4],
            [0, 0, 0],
        ]

    @pytest.mark.parametrize("wanted", [-1, 0])
    def test_evicting_nothing_is_nothing(self, pool: Pool, wanted: int) -> None:
        pool.put(range(8))
        assert pool.cache.evict(wanted) == 0
        assert pool.cache.total_pages == 2

    def test_allocate_evicts_only_what_is_missing(self) -> None:
        pool = Pool(num_pages=11)
        pool.put(range(32))
        assert pool.cache.available_pages == 10
        pages = pool.cache.allocate(5)
        assert pages is not None
        assert pool.cache.total_pages == 5
        assert pool.cached(range(32)) == 20

    def test_allocate_is_all_or_nothing(self) -> None:
        """Behaviour 12, the cache's part: an allocation that cannot succeed evicts nothing."""
        pool = Pool(num_pages=11)
        pool.put(range(16))
        handle = pool.cache.lock(pool.cache.match(NAMESPACE, int32(range(8))))
        assert pool.cache.allocate(9) is None
        assert pool.cached(range(16)) == 16
        assert pool.allocator.free_pages == 6
        pages = pool.cache.allocate(8)
        assert pages is not None
        assert pool.cached(range(16)) == 8
        pool.cache.unlock(handle)
        pool.check()

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_cost_does_not_grow_with_the_tree(
        self, page_size: int, visited: Callable[[Callable[[], object]], set[int]]
    ) -> None:
        """Behaviour 14: eviction touches as many nodes in a tree of 10,000 prefixes as in one of 100."""
        touched = []
        for num_prefixes in (100, 10_000):
            pool = Pool(page_size, num_pages=2 * num_prefixes + 2)
            for index in range(num_prefixes):
                pool.put([index % 7] * page_size + [index] * page_size)
            touched.append([len(visited(lambda: pool.cache.evict(1))) for _ in range(50)])  # noqa: B023
        assert touched[0] == touched[1]
        # The leaf and its parent; the root is looked at when a leaf of its own goes.
        assert max(touched[0]) <= 3


def test_flush_keeps_what_is_locked(pool: Pool) -> None:
    """Behaviour 29: flush with requests running drops all that none of them holds, and what they hold stays right."""
    running = pool.sequence(range(12))
    assert running.compute(8)
    running.insert()
    pool.put([*range(8), 90, 91, 92, 93])
    pool.put(range(200, 220))
    assert pool.cache.flush() == 6
    pool.check()
    assert pool.cached(range(12)) == 8
    assert pool.cached([*range(8), 90, 91, 92, 93]) == 8
    assert running.compute()
    running.end()
    assert pool.cached(range(12)) == 12
    assert pool.cache.flush() == 3
    assert pool.cached(range(12)) == 0

"""How sequences come into the radix cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.cached_sequence import int32
from tests.support.prefix_pool import NAMESPACE, Pool
from worker.memory.page_allocator import PageError


class TestInsert:
    def test_chunks_extend_the_handle(self, pool: Pool) -> None:
        sequence = pool.sequence(range(22))
        lengths = []
        while sequence.computed < 22:
            assert sequence.compute(5)
            sequence.insert()
            lengths.append((sequence.computed, sequence.handle.length))
            pool.check()
        assert lengths == [(5, 4), (10, 8), (15, 12), (20, 20), (22, 20)]
        assert pool.cache.protected_pages == 5
        assert len(sequence.own) == 1
        sequence.end()

    def test_a_chunk_neither_walks_nor_locks_its_prefix_again(
        self, pool: Pool, visited: Callable[[Callable[[], object]], set[int]]
    ) -> None:
        """Behaviour 11: a chunk continuation neither matches nor locks the prefix a second time."""
        sequence = pool.sequence(range(384))
        others = []
        for _ in range(5):
            assert sequence.compute(64)
            sequence.insert()
            # Another request at the end of each chunk makes each a node of its own.
            others.append(pool.cache.lock(pool.cache.match(NAMESPACE, sequence.tokens[: sequence.computed])))
        prefix = {node: node.locks for node in pool.cache.nodes()}
        assert len(prefix) == 6
        end = sequence.handle.node
        assert sequence.compute(64)
        touched = visited(sequence.insert)
        assert touched & {id(node) for node in prefix} == {id(end)}
        assert {node: node.locks for node in prefix} == prefix
        sequence.end()
        for other in others:
            pool.cache.unlock(other)

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_a_prompt_in_many_chunks_is_one_node(self, page_size: int) -> None:
        pool = Pool(page_size, num_pages=1001)
        sequence = pool.sequence(range(1000))
        while sequence.computed < 1000:
            assert sequence.compute(33)
            sequence.insert()
            pool.check()
        assert len(list(pool.cache.nodes())) == 2
        sequence.end()

    def test_a_leaf_under_another_handle_does_not_grow(self, pool: Pool) -> None:
        first, second = pool.sequence(range(8)), pool.sequence(range(12))
        assert first.compute()
        assert second.compute()
        first.insert()
        second.insert()
        assert (first.handle.length, second.handle.length) == (8, 12)
        third = pool.sequence(range(12))
        assert third.cached == third.handle.length == 8
        third.tokens = int32([*range(8), 70, 71, 72, 73])
        assert third.compute()
        third.insert()
        assert (first.handle.length, second.handle.length, third.handle.length) == (8, 12, 12)
        for sequence in (first, second, third):
            sequence.end()

    def test_duplicates_stay_the_requests_own(self, pool: Pool) -> None:
        """Behaviour 2: pages that a launched step may read are not freed behind the request's back."""
        first, second = pool.sequence(range(12)), pool.sequence([*range(8), 70, 71, 72, 73])
        assert first.compute()
        assert second.compute()
        first.insert()
        free = pool.allocator.free_pages
        inserted = second.insert()
        assert pool.allocator.free_pages == free
        assert not pool.allocator.is_free(inserted.duplicate_pages).any()
        assert inserted.duplicate_pages.tolist() == [4, 5]
        assert inserted.pages.tolist() == [1, 2, 6]
        assert second.own == {4, 5}
        assert second.insert().duplicate_pages.tolist() == [], "named twice, they would be freed twice"
        pool.check()
        second.end()
        first.end()
        assert pool.allocator.free_pages == pool.allocator.total_pages - 4

    def test_a_request_may_switch_to_the_trees_pages(self, pool: Pool) -> None:
        first, second = pool.sequence(range(12)), pool.sequence(range(12))
        assert first.compute()
        assert second.compute()
        first.end()
        second.adopt(second.insert())
        assert second.pages.tolist() == first.pages.tolist()
        assert pool.allocator.free_pages + 3 == pool.allocator.total_pages
        second.end()

    def test_the_tree_takes_duplicates_for_pages_that_nobody_else_locks(self, pool: Pool) -> None:
        first, second, third = pool.sequence(range(12)), pool.sequence(range(12)), pool.sequence(range(8))
        for sequence in (first, second, third):
            assert sequence.compute()
        for sequence in (first, third, second):
            sequence.insert()
        first.end()
        free = pool.allocator.free_pages
        assert pool.cache.exchange(second.handle, second.pages).tolist() == second.pages[2:].tolist()
        assert pool.allocator.free_pages == free + 1
        third.end()
        assert pool.cache.exchange(second.handle, second.pages).tolist() == second.pages[:2].tolist()
        assert pool.cache.exchange(second.handle, second.pages).tolist() == []
        assert pool.cache.match(NAMESPACE, second.tokens).pages.tolist() == second.pages.tolist()
        second.own.clear()
        pool.check()
        with pytest.raises(PageError, match="2 pages do not hold 12 tokens"):
            pool.cache.exchange(second.handle, second.pages[:2])
        second.end()
        assert pool.allocator.free_pages + 3 == pool.allocator.total_pages

    def test_a_duplicate_inside_a_longer_run_splits_it(self, pool: Pool) -> None:
        first, second = pool.sequence(range(32)), pool.sequence(range(8))
        assert first.compute()
        assert second.compute()
        first.end()
        inserted = second.insert()
        assert len(inserted.duplicate_pages) == 2
        assert pool.cache.protected_pages == 2
        second.end()

    def test_nothing_new_is_nothing_inserted(self, pool: Pool) -> None:
        sequence = pool.sequence(range(12))
        assert sequence.compute(3)
        inserted = sequence.insert()
        assert (inserted.start, len(inserted.pages), len(inserted.duplicate_pages)) == (0, 0, 0)
        assert sequence.handle.length == 0
        sequence.end()

    def test_tokens_with_too_few_pages_are_refused_whole(self, pool: Pool) -> None:
        """Behaviour 12, the cache's part: a refused insertion changes nothing."""
        sequence = pool.sequence(range(8))
        assert sequence.compute()
        pages = sequence.pages
        sequence.pages = pages[:1]
        with pytest.raises(PageError, match="1 pages do not hold 8 tokens"):
            sequence.insert()
        pool.check()
        assert pool.cache.total_pages == 0
        sequence.pages = pages
        sequence.end()

    def test_the_tree_keeps_no_view_of_the_callers_arrays(self, pool: Pool) -> None:
        sequence = pool.sequence(range(8))
        assert sequence.compute()
        sequence.insert()
        sequence.tokens[:] = 9
        sequence.pages[:] = 9
        assert pool.cache.match(NAMESPACE, int32(range(8))).pages.tolist() == [1, 2]
        sequence.tokens[:] = range(8)
        sequence.end()

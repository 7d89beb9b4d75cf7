from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from radixfleet.blocks import chain_hashes, seed_hash
from tests.support.cached_sequence import CachedSequence, int32
from worker.memory.page_allocator import PageAllocator, PageError
from worker.memory.portions import PER_NODE, Portions
from worker.memory.radix_cache import RadixCache
from worker.memory.radix_tree import Node

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


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.check()
    assert pool.cache.protected_pages == 0, "a test left a lock behind"
    pool.cache.flush()
    assert pool.allocator.free_pages == pool.allocator.total_pages, "pages leaked"
    assert list(pool.cache.nodes()) == [], "a namespace leaked"


def test_finds_the_longest_prefix_in_whole_pages(pool: Pool) -> None:
    pool.put(range(14))
    assert pool.cached(range(14)) == 12
    assert pool.cached(range(100)) == 12
    assert pool.cached(range(11)) == 8
    assert pool.cached([0, 1, 2, 3, 4, 5, 99, 7, 8]) == 4
    assert pool.cached([0, 1, 2]) == 0
    assert pool.cached([]) == 0
    match = pool.cache.match(NAMESPACE, int32(range(9)))
    assert match.pages.tolist() == [1, 2]
    assert match.slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert match.slots.dtype == np.int32


def test_branches_share_what_they_have_in_common(pool: Pool) -> None:
    pool.put(range(12))
    fork = pool.sequence([*range(8), 50, 51, 52, 53])
    assert fork.cached == 8
    assert fork.compute()
    assert len(fork.own) == 1
    fork.end()
    assert pool.cache.total_pages == 4
    assert pool.cached(range(12)) == 12
    assert pool.cached([*range(8), 50, 51, 52, 53]) == 12


def test_refuses_a_page_size_that_does_not_divide_a_routing_block() -> None:
    for page_size in (3, 128):
        with pytest.raises(ValueError, match="does not divide"):
            RadixCache(PageAllocator(10, page_size))


def test_refuses_tokens_of_another_type(pool: Pool) -> None:
    with pytest.raises(TypeError, match="int64"):
        pool.cache.match(NAMESPACE, np.arange(8))  # type: ignore[arg-type]


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
        assert inserted.slots.tolist() == [*range(4, 12), *range(24, 28)]
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
        assert second.slots.tolist() == first.slots.tolist()
        assert pool.allocator.free_pages + 3 == pool.allocator.total_pages
        second.end()

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
        assert (inserted.start, len(inserted.slots), len(inserted.duplicate_pages)) == (0, 0, 0)
        assert sequence.handle.length == 0
        sequence.end()

    def test_slots_that_do_not_fill_pages_are_refused_whole(self, pool: Pool) -> None:
        """Behaviour 12, the cache's part: a refused insertion changes nothing."""
        sequence = pool.sequence(range(8))
        assert sequence.compute()
        good = sequence.slots.copy()
        sequence.slots[5] += 1
        with pytest.raises(PageError, match="whole pages"):
            sequence.insert()
        pool.check()
        assert pool.cache.total_pages == 0
        sequence.slots = good
        sequence.end()

    def test_the_tree_keeps_no_view_of_the_callers_arrays(self, pool: Pool) -> None:
        sequence = pool.sequence(range(8))
        assert sequence.compute()
        sequence.insert()
        sequence.tokens[:] = 9
        assert pool.cached(range(8)) == 8
        sequence.tokens[:] = range(8)
        sequence.end()


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


class TestNamespaces:
    def test_parts_cannot_collide(self, pool: Pool) -> None:
        """Behaviour 27: namespaces are tuples, so no concatenation of their parts can make two of them one."""
        namespaces = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")]
        for namespace in namespaces:
            assert pool.cached(range(8), namespace) == 0
            pool.put(range(8), namespace)
        pages = [pool.cache.match(namespace, int32(range(8))).pages.tolist() for namespace in namespaces]
        assert len({tuple(found) for found in pages}) == len(namespaces)
        assert len(pool.cache.block_hashes()) == 0
        assert pool.cache.total_pages == 10

    def test_an_empty_namespace_vanishes(self, pool: Pool) -> None:
        for index in range(50):
            namespace = ("model", f"tenant-{index}")
            pool.put(range(8), namespace)
            pool.cache.evict(2)
            pool.cache.unlock(pool.cache.lock(pool.cache.match(namespace, int32(range(8)))))
        assert list(pool.cache.nodes()) == []

    def test_a_namespace_in_use_stays(self, pool: Pool) -> None:
        sequence = pool.sequence(range(8))
        pool.put(range(100, 108))
        pool.cache.flush()
        assert sequence.compute()
        sequence.insert()
        assert pool.cached(range(8)) == 8
        sequence.end()


class TestPrompts:
    def test_the_next_turn_finds_the_generated_tokens(self, pool: Pool) -> None:
        """Behaviour 26: the second turn's cached tokens include what the first turn generated."""
        prompt, answer, question = list(range(10)), list(range(300, 309)), list(range(600, 605))
        first = pool.sequence(prompt)
        assert first.compute()
        first.insert()
        first.tokens = int32([*prompt, *answer])
        while first.computed < len(first.tokens):
            assert first.compute(1)
        first.end()
        assert pool.cached([*prompt, *answer, *question]) == 16

    @pytest.mark.parametrize("page_size", [1, 2, 16])
    def test_the_last_token_of_a_cached_prompt_is_left_to_compute(self, page_size: int) -> None:
        """Behaviour 28: a prompt that is wholly cached still computes its last token."""
        pool = Pool(page_size)
        prompt = range(32)
        pool.put(prompt)
        assert pool.cached(prompt) == 32
        assert pool.sequence(prompt).cached == 32 - page_size

    def test_a_limit_is_in_tokens_and_rounds_down_to_pages(self, pool: Pool) -> None:
        pool.put(range(16))
        lengths = [pool.cache.match(NAMESPACE, int32(range(16)), limit=limit).length for limit in (0, 3, 4, 11, 16, 99)]
        assert lengths == [0, 0, 4, 8, 16, 16]


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


class TestBlockHashes:
    """Routing blocks are 64 tokens, whatever the pages and nodes they lie in."""

    TOKENS = (*range(1000, 1300),)

    def expected(self, tokens: Sequence[int]) -> list[int]:
        return sorted(chain_hashes(seed_hash(NAMESPACE), np.array(tokens, dtype=np.uint32)).tolist())

    @pytest.mark.parametrize("page_size", [1, 2, 16, 64])
    @pytest.mark.parametrize("chunk", [1, 30, 64, 100, 300])
    def test_are_those_of_the_contract_however_the_sequence_came(self, page_size: int, chunk: int) -> None:
        pool = Pool(page_size, num_pages=302)
        sequence = pool.sequence(self.TOKENS)
        while sequence.computed < len(self.TOKENS):
            assert sequence.compute(chunk)
            sequence.insert()
        pool.check()
        assert pool.cache.block_hashes().tolist() == self.expected(self.TOKENS)
        evicted, added = pool.cache.block_events.drain()
        assert (evicted.tolist(), added.tolist()) == ([], self.expected(self.TOKENS))
        sequence.end()

    def test_follow_a_trim_through_a_block(self) -> None:
        pool = Pool(page_size=16, num_pages=30)
        pool.put(self.TOKENS)
        pool.cache.block_events.drain()
        pool.cache.evict(3)
        assert pool.cache.block_hashes().tolist() == self.expected(self.TOKENS[:192])
        evicted, added = pool.cache.block_events.drain()
        assert set(evicted.tolist()) == set(self.expected(self.TOKENS)) - set(self.expected(self.TOKENS[:192]))
        assert len(added) == 0
        pool.put(self.TOKENS)
        pool.check()
        assert pool.cache.block_events.drain()[1].tolist() == evicted.tolist()

    def test_a_block_across_a_fork_belongs_to_its_branch(self) -> None:
        pool = Pool(page_size=16, num_pages=60)
        other = [*self.TOKENS[:96], *range(5000, 5100)]
        pool.put(self.TOKENS)
        pool.put(other)
        pool.check()
        assert set(pool.cache.block_hashes().tolist()) == {*self.expected(self.TOKENS), *self.expected(other)}
        pool.cache.evict(12)
        pool.check()
        kept = self.expected(other)
        assert pool.cache.block_hashes().tolist() == kept

    def test_churn_between_two_reports_does_not_show(self) -> None:
        pool = Pool(page_size=16, num_pages=60)
        pool.put(self.TOKENS)
        pool.cache.flush()
        assert [part.tolist() for part in pool.cache.block_events.drain()] == [[], []]

    def test_a_digest_of_an_empty_cache_is_empty(self) -> None:
        assert Pool().cache.block_hashes().tolist() == []


class TestCheck:
    """The checker finds what it is there to find."""

    def broken(self, damage: Callable[[Pool, Node], object], complaint: str) -> None:
        pool = Pool()
        pool.put(range(68))
        pool.put([*range(8), 80, 81, 82, 83])
        pool.check()
        upper = next(node for node in pool.cache.nodes() if node.children and node.parent)
        damage(pool, upper)
        with pytest.raises(PageError, match=complaint):
            pool.cache.check()

    def test_wrong_counts(self) -> None:
        self.broken(lambda pool, _: setattr(pool.cache, "_evictable_pages", 3), "evictable pages are miscounted")
        self.broken(lambda pool, _: setattr(pool.cache, "_protected_pages", 3), "protected pages are miscounted")

    def test_a_wrong_eviction_order(self) -> None:
        self.broken(lambda pool, node: pool.cache._evictable.move_to_end(node, last=False), "before its child")
        self.broken(lambda pool, node: pool.cache._evictable.pop(node), "just the unlocked")

    def test_pages_with_two_owners(self) -> None:
        self.broken(lambda pool, node: pool.allocator.free(node.pages[:1]), "free list")
        self.broken(lambda _, node: node.pages.fill(node.pages[0]), "twice")

    def test_damage_to_nodes(self) -> None:
        self.broken(lambda _, node: setattr(node, "locks", -1), "fewer locks than none")
        self.broken(lambda _, node: setattr(next(iter(node.children.values())), "locks", 1), "than its children")
        self.broken(lambda _, node: setattr(node, "pages", node.pages[:1]), "another number of tokens")
        self.broken(lambda _, node: setattr(node, "start", 4), "where its parent ends")
        self.broken(lambda _, node: node.tokens.fill(1), "another page's tokens")
        self.broken(lambda _, node: next(iter(node.children.values())).hashes.fill(1), "block hashes")

    def test_a_large_tree_is_checked_in_small_portions(self) -> None:
        """An idle worker is never far from its next request: no portion reads more than some hundred nodes' worth."""
        pool = Pool(num_pages=3000)
        for first in range(500):
            pool.put([first, 1, 2, 3, first, 5, 6, 7])
        portions = sum(1 for _ in pool.cache.checks(Portions()))
        assert portions >= 500 * PER_NODE // 8_192
        few_portions = sum(1 for _ in pool.cache.checks(Portions(1 << 30)))
        assert few_portions == 0

    def test_the_check_tells_which_pages_are_in_the_tree(self) -> None:
        pool = Pool()
        pool.put(range(68))
        checks = pool.cache.checks(Portions(1 << 30))
        with pytest.raises(StopIteration) as ended:
            next(checks)
        in_tree = ended.value.value
        assert in_tree.sum() == pool.cache.total_pages > 0
        assert not pool.allocator.is_free(np.flatnonzero(in_tree)).any()


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], set[int]]:
    """Runs a function and returns the ids of all nodes of which it read an attribute."""
    plain = object.__getattribute__

    def run(function: Callable[[], object]) -> set[int]:
        seen: set[int] = set()

        def getattribute(node: Node, name: str) -> object:
            seen.add(id(node))
            return plain(node, name)

        with monkeypatch.context() as patch:
            patch.setattr(Node, "__getattribute__", getattribute)
            function()
        return seen

    return run

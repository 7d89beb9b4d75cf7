"""What of a prompt the radix cache finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.cached_sequence import int32
from tests.support.prefix_pool import NAMESPACE, Pool
from worker.memory.page_allocator import PageAllocator, PageError
from worker.memory.radix_cache import RadixCache


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
    assert match.pages.dtype == np.int32


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


class TestGoingOn:
    """A match that goes on from an earlier one of the same tokens finds what a new one finds, for less."""

    def test_what_has_not_changed_is_the_same_match(self, pool: Pool) -> None:
        pool.put(range(12))
        tokens = int32(range(40))
        known = pool.cache.match(NAMESPACE, tokens)
        pool.put(range(50, 70))
        assert pool.cache.match(NAMESPACE, tokens, known=known) is known

    def test_what_others_add_behind_the_same_prefix_leaves_a_match_as_it_is(self, pool: Pool) -> None:
        """Behind a hot prefix something is added in every step."""
        for first in (50, 60):
            pool.put([*range(12), *range(first, first + 4)])
        tokens = int32(range(40))
        known = pool.cache.match(NAMESPACE, tokens)
        assert known.length == 12
        pool.put([*range(12), 70, 71, 72, 73])
        assert known.is_current
        assert pool.cache.match(NAMESPACE, tokens, known=known) is known
        pool.put(range(20))
        assert not known.is_current
        assert pool.cache.match(NAMESPACE, tokens, known=known).length == 20

    @pytest.mark.parametrize(("length", "is_current"), [(4, True), (8, False), (12, False)])
    def test_a_match_that_ends_within_a_run_stands_while_the_run_is_whole_there(
        self, pool: Pool, length: int, is_current: bool
    ) -> None:
        """`length`: where the run is split by another prompt."""
        pool.put(range(16))
        tokens = int32([*range(8), 70, 71, 72, 73])
        known = pool.cache.match(NAMESPACE, tokens)
        assert known.length == 8
        pool.put([*range(length), 90, 91, 92, 93])
        assert known.is_current == is_current
        assert pool.cache.match(NAMESPACE, tokens, known=known).length == 8

    def test_a_namespace_that_went_and_came_again_is_another(self, pool: Pool) -> None:
        first = pool.sequence(range(8))
        known = pool.cache.match(NAMESPACE, int32(range(8)))
        assert known.is_current
        first.abort()
        assert not known.is_current
        pool.put(range(8))
        assert not known.is_current
        assert pool.cache.match(NAMESPACE, int32(range(8)), known=known).length == 8

    @pytest.mark.parametrize("known_tokens", [0, 8, 12])
    def test_what_came_since_is_found(self, pool: Pool, known_tokens: int) -> None:
        pool.put(range(known_tokens))
        tokens = int32(range(40))
        known = pool.cache.match(NAMESPACE, tokens)
        assert known.length == known_tokens
        pool.put([*range(6), 99, 99])
        pool.put(range(22))
        again = pool.cache.match(NAMESPACE, tokens, known=known)
        assert again.length == 20
        assert again.pages.tolist() == pool.cache.match(NAMESPACE, tokens).pages.tolist()

    def test_what_a_leaf_has_grown_by_is_found(self, pool: Pool) -> None:
        sequence = pool.sequence(range(24))
        sequence.compute(8)
        sequence.insert()
        known = pool.cache.match(NAMESPACE, sequence.tokens)
        sequence.compute()
        sequence.insert()
        assert pool.cache.match(NAMESPACE, sequence.tokens, known=known).length == 24
        sequence.end()

    def test_what_was_cut_and_grew_again_with_other_tokens_is_not_mistaken(self, pool: Pool) -> None:
        pool.put(range(12))
        tokens = int32(range(12))
        known = pool.cache.match(NAMESPACE, tokens)
        assert known.length == 12
        pool.cache.evict(2)
        pool.put([0, 1, 2, 3, 70, 71, 72, 73, 74, 75, 76, 77])
        assert pool.cache.match(NAMESPACE, tokens, known=known).length == 4

    def test_a_prefix_that_stayed_the_same_is_not_walked_again(
        self, pool: Pool, visited: Callable[[Callable[[], object]], set[int]]
    ) -> None:
        """However deep: a step asks this of every request in its window."""
        for length in range(8, 44, 4):
            pool.put([*range(length), 99, 99, 99, 99])
        tokens = int32(range(60))
        known = pool.cache.match(NAMESPACE, tokens)
        assert len(visited(lambda: pool.cache.match(NAMESPACE, tokens))) > 8
        assert len(visited(lambda: pool.cache.match(NAMESPACE, tokens, known=known))) <= 2

    def test_pages_that_were_evicted_since_are_not_told(self, pool: Pool) -> None:
        pool.put(range(12))
        known = pool.cache.match(NAMESPACE, int32(range(12)))
        pool.cache.evict(3)
        with pytest.raises(PageError, match="no longer"):
            _ = known.pages

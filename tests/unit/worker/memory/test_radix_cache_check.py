"""That broken books are noticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.prefix_pool import Pool
from worker.memory.page_allocator import PageError
from worker.memory.portions import PER_NODE, Portions
from worker.memory.radix_tree import Node


def leaf_below(node: Node) -> Node:
    while node.children:
        node = next(iter(node.children.values()))
    return node


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
        self.broken(lambda pool, _: setattr(pool.cache._locks, "evictable_pages", 3), "evictable pages are miscounted")
        self.broken(lambda pool, _: setattr(pool.cache._locks, "protected_pages", 3), "protected pages are miscounted")

    def test_a_wrong_eviction_order(self) -> None:
        self.broken(lambda pool, node: pool.cache._locks.order.move_to_end(node, last=False), "before its child")
        self.broken(lambda pool, node: pool.cache._locks.order.pop(node), "just the unlocked")

    def test_pages_with_two_owners(self) -> None:
        self.broken(lambda pool, node: pool.allocator.free(node.pages[:1]), "free list")
        self.broken(lambda _, node: node.pages.fill(node.pages[0]), "twice")

    def test_damage_to_nodes(self) -> None:
        self.broken(lambda _, node: setattr(node, "locks", -1), "fewer locks than none")
        self.broken(lambda _, node: setattr(next(iter(node.children.values())), "locks", 1), "than its children")
        self.broken(lambda _, node: setattr(node, "pages", node.pages[:1]), "another number of tokens")
        self.broken(lambda _, node: setattr(node, "start", 4), "where its parent ends")
        self.broken(lambda _, node: node.tokens.fill(1), "another page's tokens")
        self.broken(lambda _, node: setattr(leaf_below(node), "end", 64), "with its last token")
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

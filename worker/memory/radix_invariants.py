"""What must hold of a prefix tree and its books at every moment. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from worker.memory.locks import Locks
from worker.memory.page_allocator import PageAllocator, PageError
from worker.memory.portions import PER_NODE, Portions
from worker.memory.radix_tree import Node, Root, check_node


def checks(
    nodes: Iterable[Node], locks: Locks, allocator: PageAllocator, portions: Portions
) -> Generator[None, None, npt.NDArray[np.bool_]]:
    """Verify all of it, in portions between which nothing may change; raises PageError. O(tree).

    Returns which pages are in the tree, bool [num_pages].
    """
    in_tree = np.zeros(allocator.num_pages, dtype=np.bool_)
    locks_below: Counter[Node] = Counter()
    evictable = protected = num_unlocked = 0
    for node in nodes:
        check_node(node, allocator.page_size)
        if isinstance(node, Root):
            _expect(bool(node.children or node.locks), "a namespace is empty")
        else:
            _expect(not in_tree[node.pages].any(), "a page is in the tree twice")
            _expect(not allocator.is_free(node.pages).any(), "a page of the tree is on the free list")
            in_tree[node.pages] = True
        if node.locks and node.parent is not None:
            locks_below[node.parent] += node.locks
        if node.locks or isinstance(node, Root):
            protected += len(node.pages)
        else:
            _expect(node in locks.order, "the eviction order does not hold just the unlocked nodes")
            num_unlocked += 1
            evictable += len(node.pages)
        if portions.spend(PER_NODE + len(node.tokens)):
            yield
    for node, num_locks in locks_below.items():
        _expect(node.locks >= num_locks, "a node has fewer locks than its children")
    _expect(num_unlocked == len(locks.order), "the eviction order does not hold just the unlocked nodes")
    _expect(evictable == locks.evictable_pages, "evictable pages are miscounted")
    _expect(protected == locks.protected_pages, "protected pages are miscounted")
    _expect(int(np.count_nonzero(in_tree)) == locks.total_pages, "a page is in the tree twice")
    yield from _check_order(locks, portions)
    return in_tree


def _check_order(locks: Locks, portions: Portions) -> Iterator[None]:
    evicted: set[Node] = set()
    for node in locks.order:
        for child in node.children.values():
            _expect(child in evicted, "a node is to be evicted before its child")
        evicted.add(node)
        if portions.spend(PER_NODE // 16):
            yield


def _expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion, which -O would drop
    if not holds:
        raise PageError(otherwise)

"""Which nodes of the prefix tree are locked, how many pages that protects, and in which order the others are evicted.

`order` holds every unlocked node, least recently used first. A node is in use until its last lock goes. A release walks
upwards, and a parent never loses its last lock before its child, so in this order every node comes after all its
descendants: the first entry is always a leaf, and eviction takes entries without ever searching the tree. A split needs
no place in the order, because whoever causes it locks the new parent at once.

Owned by `RadixCache`. Roots can be locked, but hold no pages and are never in the order.
"""

from __future__ import annotations

from collections import OrderedDict

from worker.memory.radix_tree import Node


class Locks:
    """See the head of the module."""

    def __init__(self) -> None:
        self.order: OrderedDict[Node, None] = OrderedDict()
        self.evictable_pages = 0
        self.protected_pages = 0

    @property
    def total_pages(self) -> int:
        """Pages in the tree."""
        return self.evictable_pages + self.protected_pages

    @property
    def next_leaf(self) -> Node:
        """The first to be evicted. There must be one."""
        return next(iter(self.order))

    def acquire(self, node: Node, until: Node | None = None) -> None:
        """One lock more from `node` up to, but without, `until`; by default up to the root."""
        above: Node | None = node
        while above is not None and above is not until:
            if not above.locks and above.parent is not None:
                self.order.pop(above, None)
                self.evictable_pages -= len(above.pages)
                self.protected_pages += len(above.pages)
            above.locks += 1
            above = above.parent

    def release(self, node: Node) -> Node:
        """One lock less from `node` up to the root, which is returned. Who has none left is now the latest used."""
        while True:
            node.locks -= 1
            if node.parent is None:
                return node
            if not node.locks:
                self.order[node] = None
                self.protected_pages -= len(node.pages)
                self.evictable_pages += len(node.pages)
            node = node.parent

    def put_first(self, node: Node) -> None:
        """An unlocked node is the next to be evicted. All below it must be put before it, parents first."""
        self.order.move_to_end(node, last=False)

    def hung(self, num_pages: int) -> None:
        """A node with so many pages was added. Counted as evictable for a moment: whoever adds it locks it."""
        self.evictable_pages += num_pages

    def grown(self, num_pages: int) -> None:
        """A locked node has so many pages more."""
        self.protected_pages += num_pages

    def evicted(self, leaf: Node, num_pages: int) -> None:
        """An unlocked leaf lost so many pages, or all of them and its place in the tree."""
        self.evictable_pages -= num_pages
        if leaf.parent is None:
            del self.order[leaf]

"""What the radix cache gives to those who use it: a match that was found, a handle that protects it, what became of
pages given to the tree. Owned by the engine's thread.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from worker.core.arrays import Int32Array
from worker.memory.page_allocator import PageError
from worker.memory.radix_tree import Node, pages_of_prefix

Namespace: TypeAlias = tuple[str, ...]

NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)


class Match(NamedTuple):
    """The longest cached prefix found. Protects nothing: lock it before anything is inserted, allocated or evicted."""

    length: int
    """Tokens, a multiple of the page size."""
    page_size: int
    namespace: Namespace
    node: Node | None
    """Where the match ended, the root where nothing matched; None when the namespace is empty."""
    cuts: int = 0
    """The node's `cuts` when it was found: unchanged, a later match of the same tokens may go on from here."""
    is_at_end: bool = False
    """The match ended where the node did."""
    sought: bytes = b""
    """The page of tokens for which the node had no child; empty where nothing more was looked for."""

    @property
    def is_current(self) -> bool:
        """Whether the same tokens with the same limit match the same prefix now. A no may be wrong, and costs a search.

        As long as the node was not cut, all that can have come is a longer run or the child sought at its end, and a
        part of the run that is now above it.
        """
        node = self.node
        if node is None or node.cuts != self.cuts:
            return False
        if self.is_at_end:
            return node.end == self.length and self.sought not in node.children
        return node.start < self.length

    @property
    def pages(self) -> Int32Array:
        """int32 [length / page_size]. Raises PageError when the tree has lost some of them since."""
        runs = [] if self.node is None else pages_of_prefix(self.node, self.length // self.page_size, self.page_size)
        return np.concatenate(runs) if runs else NO_PAGES

    def still_there(self) -> tuple[Node | None, int]:
        """(where the prefix ends now, its length); (None, 0) where it has to be found again.

        It is there as long as its node is in the tree and was never cut: the path to it can only have been split.
        """
        node = self.node
        if node is None or node.parent is None or node.cuts != self.cuts:
            return None, 0
        while self.length <= node.start:
            assert node.parent is not None, "a match has tokens, and a root has none"
            node = node.parent
        return node, self.length


class Handle:
    """One request's lock on a prefix and all that leads to it. Made by `lock`, moved by `insert`, ended by `unlock`.

    Only the cache calls `move` and `end`.
    """

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node: Node | None = node

    @property
    def node(self) -> Node:
        """Where the prefix ends. Raises PageError once unlocked."""
        if self._node is None:
            raise PageError("the handle was unlocked already")
        return self._node

    @property
    def length(self) -> int:
        """Tokens of the locked prefix."""
        return self.node.end

    def move(self, node: Node) -> None:
        """Let the lock end at `node`, which is below."""
        self._node = node

    def end(self) -> Node:
        """End the handle; returns the node where its prefix ended. Raises PageError once unlocked."""
        node = self.node
        self._node = None
        return node


class Inserted(NamedTuple):
    """What `insert` did with the pages from position `start` on: from the handle's old end to its new one."""

    start: int
    pages: Int32Array
    """The tree's pages for them: the request's own where it was first."""
    duplicate_pages: Int32Array
    """Pages that the tree did not take: the request's, to free when no launched step reads them. Named once."""

"""The nodes of the prefix tree, and the two surgeries on them: split and trim. Structure only; `radix_cache` keeps the books.

A node is a run of tokens and the pages that hold their KV. What is said of lengths here is in tokens, and whole pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, seed_hash
from radixfleet.types import BlockHash
from worker.core.step import Int32Array
from worker.memory.page_allocator import PageError

HashArray = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Node:
    """Tokens of positions [start, end) after the parent's, with their pages. Both ends are page boundaries."""

    tokens: Int32Array
    """int32 [end - start]; never empty but in a root."""
    pages: Int32Array
    """int32 [(end - start) / page_size]."""
    start: int
    parent: Node | None
    """None in a root, and in a node that has left its tree."""
    hashes: HashArray
    """Chained hashes of the routing blocks that end in (start, end]; they may begin in an ancestor."""
    children: dict[bytes, Node] = field(default_factory=dict)
    """By the bytes of the child's first page of tokens: no two children agree on a whole page."""
    locks: int = 0
    """Handles at this node or below it."""

    @property
    def end(self) -> int:
        """Position after the node's last token: the length of the prefix that ends with it."""
        return self.start + len(self.tokens)


@dataclass(slots=True, eq=False)
class Root(Node):
    """The empty prefix of one namespace. Its `hashes` hold the one seed that the namespace's chains start from."""

    namespace: tuple[str, ...] = ()


def make_root(namespace: tuple[str, ...]) -> Root:
    """A root without children."""
    empty = np.empty(0, dtype=np.int32)
    seed = np.array([seed_hash(namespace)], dtype=np.uint64)
    return Root(tokens=empty, pages=empty, start=0, parent=None, hashes=seed, namespace=namespace)


def common_length(left: Int32Array, right: Int32Array) -> int:
    """Number of leading entries in which two arrays agree; at the speed of memory, not of Python."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def num_blocks(start: int, end: int) -> int:
    """Routing blocks that end in (start, end]."""
    return end // BLOCK_TOKENS - start // BLOCK_TOKENS


def hashes_below(parent: Node, tokens: Int32Array, end: int) -> HashArray:
    """Hashes of the routing blocks that end in (parent.end, end]. `tokens`: the whole prefix, from position 0."""
    ancestor: Node | None = parent
    while ancestor is not None and not len(ancestor.hashes):
        ancestor = ancestor.parent
    if ancestor is None:
        raise PageError("the node is in no tree")
    boundary = parent.end // BLOCK_TOKENS * BLOCK_TOKENS
    return chain_hashes(BlockHash(int(ancestor.hashes[-1])), tokens[boundary:end].view(np.uint32))


def split(node: Node, length: int, page_size: int) -> Node:
    """Cut the first `length` tokens (whole pages, not all) off `node` into a new parent between it and its old one.

    Returns the new parent. The node itself keeps its identity and its end, so that a handle at it still names the same
    prefix; the new parent has the same locks, because every handle below it is one that the node had.

        parent [.., start)   node [start, end)
        parent [.., start)   upper [start, start + length)   node [start + length, end)
    """
    parent = node.parent
    if parent is None:
        raise PageError("only a node below a root can be split")
    cut = num_blocks(node.start, node.start + length)
    upper = Node(
        tokens=node.tokens[:length].copy(),
        pages=node.pages[: length // page_size].copy(),
        start=node.start,
        parent=parent,
        hashes=node.hashes[:cut].copy(),
        locks=node.locks,
    )
    parent.children[node.tokens[:page_size].tobytes()] = upper
    node.tokens = node.tokens[length:].copy()
    node.pages = node.pages[length // page_size :].copy()
    node.hashes = node.hashes[cut:].copy()
    node.start = upper.end
    node.parent = upper
    upper.children[node.tokens[:page_size].tobytes()] = node
    return upper


def trim(leaf: Node, pages_kept: int, page_size: int) -> tuple[Int32Array, HashArray]:
    """Shorten a leaf to its first `pages_kept` pages; none takes it out of the tree.

    Returns the pages and the block hashes that left.
    """
    parent = leaf.parent
    if parent is None or leaf.children:
        raise PageError("only a leaf below a root can be trimmed")
    if not pages_kept:
        del parent.children[leaf.tokens[:page_size].tobytes()]
        leaf.parent = None
    blocks_kept = num_blocks(leaf.start, leaf.start + pages_kept * page_size)
    pages, hashes = leaf.pages[pages_kept:], leaf.hashes[blocks_kept:]
    leaf.tokens = _shortened(leaf.tokens, pages_kept * page_size)
    leaf.pages = _shortened(leaf.pages, pages_kept)
    leaf.hashes = leaf.hashes[:blocks_kept]
    return pages, hashes


def _shortened(array: Int32Array, length: int) -> Int32Array:
    """The first entries: a view, or a copy once half of what a view keeps in memory is waste (so O(1) an entry cut off)."""
    owner = array.base if array.base is not None else array
    kept = array[:length]
    return kept.copy() if isinstance(owner, np.ndarray) and 2 * length <= owner.size else kept

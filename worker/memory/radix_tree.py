"""The nodes of the prefix tree, and what is done to their structure: split and trim. `radix_cache` keeps the books.

A node is a run of tokens and the pages that hold their KV. Lengths are in tokens and multiples of the page size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, seed_hash
from radixfleet.types import BlockHash, HashArray
from worker.core.arrays import Int32Array
from worker.core.messages import BlockRun
from worker.memory.page_allocator import PageError

_NOTHING: Int32Array = np.empty(0, dtype=np.int32)
_NO_HASHES: HashArray = np.empty(0, dtype=np.uint64)


@dataclass(slots=True, eq=False)
class Node:
    """Tokens of positions [start, end) after the parent's, with their pages. Both ends are page boundaries."""

    tokens: Int32Array
    """int32 [end - start]; never empty but in a root."""
    pages: Int32Array
    """int32 [(end - start) / page_size]."""
    start: int
    end: int
    """The length of the prefix that ends with the node's last token."""
    parent: Node | None
    """None in a root, and in a node that has left its tree."""
    hashes: HashArray
    """Chained hashes of the routing blocks that end in (start, end]; they may begin in an ancestor."""
    children: dict[bytes, Node] = field(default_factory=dict)
    """By the bytes of the child's first page of tokens: no two children agree on a whole page."""
    locks: int = 0
    """Handles at this node or below it."""
    cuts: int = 0
    """Times that its end was evicted, or a root dropped: what ends in it now may not be what ended there before."""


@dataclass(slots=True, eq=False)
class Root(Node):
    """The empty prefix of one namespace. Its `hashes` hold the one seed that the namespace's chains start from."""

    namespace: tuple[str, ...] = ()


def make_root(namespace: tuple[str, ...]) -> Root:
    """A root without children."""
    empty = np.empty(0, dtype=np.int32)
    seed = np.array([seed_hash(namespace)], dtype=np.uint64)
    return Root(tokens=empty, pages=empty, start=0, end=0, parent=None, hashes=seed, namespace=namespace)


def common_length(left: Int32Array, right: Int32Array) -> int:
    """Number of leading entries in which two arrays agree; at the speed of memory, not of Python."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def num_blocks(start: int, end: int) -> int:
    """Routing blocks that end in (start, end]."""
    return end // BLOCK_TOKENS - start // BLOCK_TOKENS


def hashes_behind(node: Node, tokens: Int32Array) -> HashArray:
    """Hashes of the routing blocks that end in (node.end, len(tokens)]. `tokens`: the prefix from position 0."""
    boundary = node.end // BLOCK_TOKENS * BLOCK_TOKENS
    return chain_hashes(_chain_at_end(node), tokens[boundary:].view(np.uint32))


def run_behind(node: Node, tokens: Int32Array, hashes: HashArray) -> BlockRun:
    """What `hashes_behind` gave, with the tokens."""
    first = node.end // BLOCK_TOKENS
    own = tokens[first * BLOCK_TOKENS : (first + len(hashes)) * BLOCK_TOKENS].copy()
    return BlockRun(_namespace(node), first, int(_chain_at_end(node)), hashes, own)


def run_of(node: Node) -> BlockRun:
    """The blocks that end in a node below a root, with their tokens. O(its own length)."""
    assert node.parent is not None, "a root has no blocks"
    first = node.start // BLOCK_TOKENS
    own = _tokens_from(node, first * BLOCK_TOKENS)[: len(node.hashes) * BLOCK_TOKENS]
    return BlockRun(_namespace(node), first, int(_chain_at_end(node.parent)), node.hashes, own)


def _namespace(node: Node) -> tuple[str, ...]:
    while node.parent is not None:
        node = node.parent
    if not isinstance(node, Root):
        raise PageError("the node is in no tree")
    return node.namespace


def _chain_at_end(node: Node) -> BlockHash:
    """Hash of the last routing block that ends at or before the node's end; the namespace's seed when there is none."""
    while not len(node.hashes):
        if node.parent is None:
            raise PageError("the node is in no tree")
        node = node.parent
    return BlockHash(int(node.hashes[-1]))


def hang(parent: Node, tokens: Int32Array, pages: Int32Array, hashes: HashArray, page_size: int) -> Node:
    """A new child of `parent` for what of `tokens` (from position 0) is behind it, with its pages and block hashes."""
    own = tokens[parent.end :].copy()
    child = Node(own, pages.copy(), start=parent.end, end=len(tokens), parent=parent, hashes=hashes)
    parent.children[own[:page_size].tobytes()] = child
    return child


def grow(leaf: Node, tokens: Int32Array, pages: Int32Array, hashes: HashArray) -> None:
    """Lengthen a leaf by what of `tokens` (from position 0) is behind it, with its pages and block hashes."""
    leaf.tokens, leaf.pages, leaf.hashes = (
        np.concatenate([leaf.tokens, tokens[leaf.end :]]),
        np.concatenate([leaf.pages, pages]),
        np.concatenate([leaf.hashes, hashes]),
    )
    leaf.end = len(tokens)


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
        end=node.start + length,
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
    leaf.cuts += 1
    if not pages_kept:
        del parent.children[leaf.tokens[:page_size].tobytes()]
        pages, hashes = leaf.pages, leaf.hashes
        leaf.parent, leaf.end, leaf.tokens, leaf.pages, leaf.hashes = None, leaf.start, _NOTHING, _NOTHING, _NO_HASHES
        return pages, hashes
    blocks_kept = num_blocks(leaf.start, leaf.start + pages_kept * page_size)
    pages, hashes = leaf.pages[pages_kept:], leaf.hashes[blocks_kept:]
    leaf.end = leaf.start + pages_kept * page_size
    leaf.tokens = _shortened(leaf.tokens, pages_kept * page_size)
    leaf.pages = _shortened(leaf.pages, pages_kept)
    leaf.hashes = leaf.hashes[:blocks_kept]
    return pages, hashes


def pages_of_prefix(node: Node, num_pages: int, page_size: int) -> list[Int32Array]:
    """The first `num_pages` pages on the path from the root to `node`, in runs. O(nodes on the path).

    Raises PageError when `node` is not in the tree any more, or ends before them.
    """
    runs: list[Int32Array] = []
    while node.parent is not None:
        first = node.start // page_size
        if first < num_pages:
            runs.append(node.pages[: num_pages - first])
        node = node.parent
    if not isinstance(node, Root) or sum(map(len, runs)) != num_pages:
        raise PageError("the prefix is in the tree no longer: something was evicted since it was matched")
    return runs[::-1]


def check_node(node: Node, page_size: int) -> None:
    """Verify what must hold of one node and its place below its parent; raises PageError. O(its own length)."""
    problems = [
        ("ends off a page", node.end % page_size),
        ("has pages for another number of tokens", len(node.pages) * page_size != len(node.tokens)),
        ("has fewer locks than none", node.locks < 0),
    ]
    if not isinstance(node, Root):
        above, key = node.parent, node.tokens[:page_size].tobytes()
        problems += [
            ("has no tokens", not len(node.tokens)),
            ("does not begin where its parent ends", above is None or node.start != above.end),
            ("is kept under another page's tokens", above is None or above.children.get(key) is not node),
        ]
        problems.append(("does not end with its last token", node.end != node.start + len(node.tokens)))
        if not any(found for _, found in problems):
            has_others = not np.array_equal(node.hashes, _recomputed_hashes(node))
            problems.append(("has block hashes that are not its tokens'", has_others))
    for problem, found in problems:
        if found:
            raise PageError(f"the node of positions {node.start}..{node.end} {problem}")


def _recomputed_hashes(node: Node) -> HashArray:
    """The node's block hashes from the tokens on its path, given that those above it are right."""
    if node.parent is None:
        raise PageError("the node is in no tree")
    boundary = node.start // BLOCK_TOKENS * BLOCK_TOKENS
    return chain_hashes(_chain_at_end(node.parent), _tokens_from(node, boundary).view(np.uint32))


def _tokens_from(node: Node, position: int) -> Int32Array:
    """The tokens of positions [position, node.end), some of which may lie in ancestors."""
    runs, above = [node.tokens], node.parent
    while above is not None and above.parent is not None and above.end > position:
        runs.append(above.tokens[max(position - above.start, 0) :])
        above = above.parent
    return np.concatenate(runs[::-1])


def _shortened(array: Int32Array, length: int) -> Int32Array:
    """The first entries: a view, or a copy once a view would keep twice its size in memory (O(1) an entry cut off)."""
    owner = array.base if array.base is not None else array
    kept = array[:length]
    return kept.copy() if isinstance(owner, np.ndarray) and 2 * length <= owner.size else kept

from __future__ import annotations

import numpy as np
import pytest

from radixfleet.blocks import seed_hash
from tests.support.cached_sequence import int32
from worker.core.arrays import Int32Array
from worker.memory.page_allocator import PageError
from worker.memory.radix_tree import Node, check_node, common_length, grow, hang, hashes_behind, make_root, split, trim

PAGE_SIZE = 4


def put(parent: Node, tokens: Int32Array, first_page: int = 1) -> Node:
    """A child of `parent`; `tokens` from position 0."""
    num_pages = (len(tokens) - parent.end) // PAGE_SIZE
    pages = np.arange(first_page, first_page + num_pages, dtype=np.int32)
    return hang(parent, tokens, pages, hashes_behind(parent, tokens), PAGE_SIZE)


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([7], [8], 0),
        ([5, 6], [5, 6], 2),
    ],
)
def test_common_length(left: list[int], right: list[int], length: int) -> None:
    assert common_length(int32(left), int32(right)) == length


def test_a_root_starts_the_chain_of_its_namespace() -> None:
    root = make_root(("model", "lora"))
    assert root.end == 0
    assert root.hashes.tolist() == [seed_hash(("model", "lora"))]
    check_node(root, PAGE_SIZE)


def test_split_keeps_the_node_and_gives_it_a_parent() -> None:
    root = make_root(("model",))
    node = put(root, int32(range(160)))
    node.locks = 3
    whole = node.hashes.copy()
    upper = split(node, 100, PAGE_SIZE)
    assert (upper.start, upper.end, node.start, node.end) == (0, 100, 100, 160)
    assert node.parent is upper
    assert upper.parent is root
    assert list(root.children.values()) == [upper]
    assert list(upper.children.values()) == [node]
    assert (upper.locks, node.locks) == (3, 3)
    assert upper.tokens.tolist() + node.tokens.tolist() == list(range(160))
    assert upper.pages.tolist() + node.pages.tolist() == list(range(1, 41))
    assert (upper.hashes.tolist(), node.hashes.tolist()) == (whole[:1].tolist(), whole[1:].tolist())
    root.locks = 3
    for part in (root, upper, node):
        check_node(part, PAGE_SIZE)


def test_a_block_that_begins_in_an_ancestor_belongs_where_it_ends() -> None:
    root = make_root(("model",))
    tokens = int32(range(160))
    node = root
    for end in (60, 64, 68, 160):
        node = put(node, tokens[:end])
    counts, above = [], node
    while above.parent is not None:
        counts.append(len(above.hashes))
        above = above.parent
    assert counts == [1, 0, 1, 0]
    assert node.hashes.tolist() == hashes_behind(root, tokens)[1:].tolist()


def test_growing_in_pieces_is_as_hanging_whole() -> None:
    tokens = int32(range(160))
    whole = put(make_root(("model",)), tokens)
    node = put(make_root(("model",)), tokens[:20])
    for end in (24, 100, 128, 160):
        pages = np.arange(node.end // PAGE_SIZE + 1, end // PAGE_SIZE + 1, dtype=np.int32)
        grow(node, tokens[:end], pages, hashes_behind(node, tokens[:end]))
        check_node(node, PAGE_SIZE)
    for name in ("tokens", "pages", "hashes", "start", "end"):
        assert np.array_equal(getattr(node, name), getattr(whole, name)), name


def test_trim_takes_pages_and_blocks_from_the_tail() -> None:
    root = make_root(("model",))
    node = put(root, int32(range(160)))
    whole = node.hashes.tolist()
    pages, hashes = trim(node, 31, PAGE_SIZE)
    assert pages.tolist() == list(range(32, 41))
    assert hashes.tolist() == whole[1:]
    assert (node.end, node.hashes.tolist()) == (124, whole[:1])
    check_node(root, PAGE_SIZE)
    check_node(node, PAGE_SIZE)


def test_trim_to_nothing_takes_the_node_out() -> None:
    root = make_root(("model",))
    node = put(root, int32(range(64)))
    pages, hashes = trim(node, 0, PAGE_SIZE)
    assert (len(pages), len(hashes)) == (16, 1)
    assert node.parent is None
    assert root.children == {}


def test_a_trimmed_leaf_does_not_keep_what_it_lost_in_memory() -> None:
    node = put(make_root(("model",)), int32(range(4096)))
    for kept in range(1023, 0, -1):
        trim(node, kept, PAGE_SIZE)
        for array in (node.tokens, node.pages):
            held = array if array.base is None else array.base
            assert isinstance(held, np.ndarray)
            assert held.size <= 2 * array.size + 1


def test_roots_and_inner_nodes_are_not_cut() -> None:
    root = make_root(("model",))
    node = put(root, int32(range(8)))
    put(node, int32(range(12)), first_page=9)
    with pytest.raises(PageError, match="below a root"):
        split(root, 4, PAGE_SIZE)
    for wrong in (root, node):
        with pytest.raises(PageError, match="only a leaf"):
            trim(wrong, 1, PAGE_SIZE)


def test_a_node_outside_a_tree_has_no_chain() -> None:
    node = put(make_root(("model",)), int32(range(8)))
    trim(node, 0, PAGE_SIZE)
    with pytest.raises(PageError, match="no tree"):
        hashes_behind(node, int32(range(64)))

"""Another engine's blocks, of any size, as our routing blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, seed_hash
from router.dialects.foreign_blocks import ForeignBlocks
from tests.support.foreign_engine import block_hash

SEED = seed_hash(("model", "", ""))


def ours(prefix: list[int]) -> list[int]:
    """Our hashes of a prefix."""
    hashes: list[int] = chain_hashes(SEED, np.array(prefix, dtype=np.uint32)).tolist()
    return hashes


@pytest.mark.parametrize("size", [1, 16, 48, 64, 100, 128, 256])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_is_what_the_engine_holds(size: int, seed: int) -> None:
    """Prefixes come in runs and go from their ends; the changes always add up to what is held."""
    draw = random.Random(seed)
    blocks, held = ForeignBlocks(), set[int]()
    cached: list[list[int]] = []
    for _ in range(60):
        if cached and draw.random() < 0.4:
            leaves = [prefix for prefix in cached if not any(other[:-size] == prefix for other in cached)]
            leaf = draw.choice(leaves)
            cached.remove(leaf)
            blocks.remove([block_hash(leaf)])
        else:
            parent = draw.choice([[], *cached])
            prefix, run = list(parent), []
            for _ in range(draw.randrange(1, 4)):
                token_ids = [draw.randrange(2) for _ in range(size)]
                prefix = prefix + token_ids
                if prefix in cached:
                    break
                cached.append(prefix)
                run.append((block_hash(prefix), token_ids))
            assert not blocks.store(SEED, block_hash(parent) if parent else None, run)
        evicted, added = (changes.tolist() for changes in blocks.drain())
        assert held.issuperset(evicted)
        assert held.isdisjoint(added)
        held = (held - set(evicted)) | set(added)
        # One of ours is held while a block in which it ends is: all of it is then on that block's path.
        expected = {
            hash_
            for prefix in cached
            for place, hash_ in enumerate(ours(prefix), start=1)
            if place * BLOCK_TOKENS > len(prefix) - size
        }
        assert held == expected == set(blocks.hashes().tolist())
    assert len(blocks) == len(held)


def test_a_block_without_a_known_parent_has_no_place() -> None:
    blocks = ForeignBlocks()
    assert blocks.store(SEED, 12345, [(1, [7] * 64), (2, [8] * 64)]) == 2
    assert not len(blocks)
    blocks.remove([1, 2])
    assert [len(changes) for changes in blocks.drain()] == [0, 0]


def test_copies_count_and_names_of_the_same_tokens_do_too() -> None:
    blocks = ForeignBlocks()
    for name in (1, 1, -5):
        blocks.store(SEED, None, [(name, [7] * 64)])
    for name in (1, -5):
        blocks.remove([name])
        assert blocks.hashes().tolist() == ours([7] * 64)
    blocks.remove([1])
    assert not len(blocks)


def test_namespaces_are_apart() -> None:
    blocks = ForeignBlocks()
    blocks.store(SEED, None, [(1, [7] * 64)])
    blocks.store(seed_hash(("model", "", "salt")), None, [(2, [7] * 64)])
    assert len(blocks) == 2


def test_clearing_takes_everything_and_what_comes_back_has_not_changed() -> None:
    blocks = ForeignBlocks()
    blocks.store(SEED, None, [(1, [7] * 64), (2, [8] * 64)])
    blocks.drain()
    blocks.clear()
    blocks.store(SEED, None, [(1, [7] * 64)])
    evicted, added = blocks.drain()
    assert (evicted.tolist(), added.tolist()) == (ours([7] * 64 + [8] * 64)[1:], [])

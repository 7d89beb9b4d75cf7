"""Cached routing blocks with their tokens, for those who hash in their own way."""

from __future__ import annotations

import random

import pytest

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, seed_hash
from radixfleet.types import BlockHash
from tests.support.cached_sequence import CachedSequence
from worker.core.messages import BlockRun
from worker.memory.page_allocator import PageAllocator
from worker.memory.radix_cache import RadixCache

NAMESPACES = (("model", "", ""), ("model", "", "salt"))


class Follower:
    """Rebuilds the prefix of every block from the runs, and checks that hashes are those of the tokens."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}

    def take(self, runs: list[BlockRun], present: set[int]) -> None:
        for run in runs:
            assert run.hashes.tolist() == chain_hashes(BlockHash(run.parent), run.token_ids.view("uint32")).tolist()
            assert len(run.token_ids) == len(run.hashes) * BLOCK_TOKENS
            if not run.first:
                assert run.parent == seed_hash(run.namespace)
                prefix: tuple[int, ...] = ()
            else:
                prefix = self.prefixes[run.parent]
            for position, block in enumerate(run.hashes.tolist()):
                prefix += tuple(run.token_ids[position * BLOCK_TOKENS : (position + 1) * BLOCK_TOKENS].tolist())
                assert len(prefix) == (run.first + position + 1) * BLOCK_TOKENS
                self.prefixes[block] = prefix
        for block in self.prefixes.keys() - present:
            del self.prefixes[block]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_runs_tell_the_tokens_of_every_block_under_splits_growth_and_eviction(page_size: int, seed: int) -> None:
    draw = random.Random(seed)
    allocator = PageAllocator(1 + 1600 // page_size, page_size)
    cache = RadixCache(allocator)
    early, late = Follower(), Follower()
    cache.block_events.follow(on=True)
    prompts: list[list[int]] = [[]]
    for _ in range(40):
        base = draw.choice(prompts)
        cut = draw.randrange(len(base) + 1)
        prompt = base[:cut] + [draw.randrange(3) for _ in range(draw.randrange(1, 200))]
        prompts.append(prompt)
        sequence = CachedSequence(cache, allocator, prompt, draw.choice(NAMESPACES))
        if sequence.compute():
            sequence.end()
        present = set(cache.block_hashes().tolist())
        early.take(cache.block_events.drain_runs() or [], present)
        assert early.prefixes.keys() == present
    late.take(cache.block_runs(), present)
    assert late.prefixes == early.prefixes
    assert len({len(prefix) for prefix in late.prefixes.values()}) > 1


def test_nobody_who_follows_no_notes() -> None:
    allocator = PageAllocator(11, 64)
    cache = RadixCache(allocator)
    sequence = CachedSequence(cache, allocator, range(128), NAMESPACES[0])
    assert sequence.compute()
    sequence.end()
    assert cache.block_events.drain_runs() is None
    cache.block_events.follow(on=True)
    assert cache.block_events.drain_runs() == []
    cache.block_events.follow(on=False)
    assert cache.block_events.drain_runs() is None

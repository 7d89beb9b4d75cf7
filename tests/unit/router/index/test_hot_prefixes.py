"""Heavy hitters: what saves most is found, in bounded memory."""

import numpy as np
import pytest

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, namespace, seed_hash
from radixfleet.clock import ManualClock
from router.index import HotPrefixes
from router.index.hot_prefixes import WINDOW_S


def prompt(name: int, blocks: int) -> np.ndarray:
    return (np.arange(blocks * BLOCK_TOKENS) % 50 + 100 * name).astype(np.uint32)


def hashes(tokens: np.ndarray) -> np.ndarray:
    return chain_hashes(seed_hash(namespace("m")), tokens)


def save(hot: HotPrefixes, tokens: np.ndarray, cached_tokens: int) -> None:
    hot.saved(hashes(tokens), tokens, "m", cached_tokens)


def test_prompts_that_share_a_prefix_meet():
    hot = HotPrefixes(ManualClock())
    for name in range(5):
        save(hot, np.concatenate([prompt(0, 4), prompt(7 + name, 3)]), cached_tokens=4 * BLOCK_TOKENS)
    save(hot, prompt(1, 2), cached_tokens=2 * BLOCK_TOKENS)
    first, second = hot.hottest(10)
    assert (first.tokens, first.requests, first.saved_tokens) == (256, 5, 5 * 256)
    assert first.block_hash == int(hashes(prompt(0, 4))[-1])
    assert (second.requests, second.saved_tokens) == (1, 128)
    assert hot.hottest(1) == [first]


def test_a_growing_chat_stays_one_entry_until_it_has_doubled():
    hot = HotPrefixes(ManualClock())
    for blocks in (4, 5, 6, 7):
        save(hot, prompt(0, 9), cached_tokens=blocks * BLOCK_TOKENS)
    assert [(prefix.tokens, prefix.requests) for prefix in hot.hottest(10)] == [(256, 4)]
    save(hot, prompt(0, 9), cached_tokens=8 * BLOCK_TOKENS)
    assert sorted(prefix.tokens for prefix in hot.hottest(10)) == [256, 512]


@pytest.mark.parametrize("cached_tokens", [0, 1, BLOCK_TOKENS - 1])
def test_less_than_a_block_is_nobodys(cached_tokens):
    hot = HotPrefixes(ManualClock())
    save(hot, prompt(0, 3), cached_tokens)
    assert hot.hottest(10) == []


def test_memory_is_bounded_and_the_heavy_one_is_never_missed():
    hot = HotPrefixes(ManualClock(), counters=8)
    for name in range(400):
        save(hot, prompt(1000 + name, 1), cached_tokens=BLOCK_TOKENS)
        if name % 4 == 0:
            save(hot, prompt(0, 1), cached_tokens=BLOCK_TOKENS)
    found = hot.hottest(100)
    assert len(found) == 8
    heavy = next(prefix for prefix in found if prefix.block_hash == int(hashes(prompt(0, 1))[0]))
    true_tokens = 100 * BLOCK_TOKENS
    assert true_tokens <= heavy.saved_tokens <= true_tokens + heavy.error_tokens


class Read(dict):
    """Counts how often an entry is read."""

    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)


def test_a_prefix_that_takes_anothers_place_looks_at_few():
    hot = HotPrefixes(ManualClock(), counters=256)
    for name in range(256):
        save(hot, prompt(name, 1), cached_tokens=BLOCK_TOKENS * (1 + name % 7))
    hot._now = read = Read(hot._now)
    for name in range(256, 1024):
        save(hot, prompt(name, 1), cached_tokens=BLOCK_TOKENS)
    assert len(read) == 256
    assert read.reads < 4 * 768


def test_old_fame_fades():
    clock = ManualClock()
    hot = HotPrefixes(clock)
    save(hot, prompt(0, 1), cached_tokens=BLOCK_TOKENS)
    clock.advance(WINDOW_S)
    save(hot, prompt(0, 1), cached_tokens=BLOCK_TOKENS)
    assert hot.hottest(1)[0].requests == 2
    clock.advance(WINDOW_S)
    assert hot.hottest(1)[0].requests == 1
    clock.advance(2 * WINDOW_S)
    assert hot.hottest(1) == []


def test_prompts_are_kept_only_when_asked_for():
    tokens = prompt(3, 2)
    for samples in (False, True):
        hot = HotPrefixes(ManualClock(), samples=samples)
        save(hot, tokens, cached_tokens=2 * BLOCK_TOKENS)
        sample = hot.hottest(1)[0].sample
        if samples:
            assert sample is not None
            assert sample.model == "m"
            assert sample.tokens.tolist() == tokens[: len(sample.tokens)].tolist()
        else:
            assert sample is None

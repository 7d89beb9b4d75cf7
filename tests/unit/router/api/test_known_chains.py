"""What is remembered of chains is what working them out says."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, namespace, seed_hash
from router.api.known_chains import MOST_PIECES, PIECE_BLOCKS, KnownChains

PIECE_TOKENS = PIECE_BLOCKS * BLOCK_TOKENS
SEED = seed_hash(namespace("m"))


@st.composite
def prompts(draw: st.DrawFn) -> list[tuple[str, np.ndarray]]:
    """Prompts of two salts, made of a few parts, so that they share beginnings and have the same parts elsewhere."""
    parts = [np.full(PIECE_TOKENS, letter, dtype=np.uint32) for letter in range(3)]
    made = []
    for _ in range(draw(st.integers(1, 6))):
        chosen = [parts[index] for index in draw(st.lists(st.integers(0, 2), max_size=3))]
        end = np.arange(draw(st.integers(0, 3 * BLOCK_TOKENS)), dtype=np.uint32)
        made.append((draw(st.sampled_from(["", "salt"])), np.concatenate([*chosen, end])))
    return made


@given(prompts())
@settings(deadline=None)
def test_a_chain_is_the_same_whether_it_is_known_or_not(asked: list[tuple[str, np.ndarray]]) -> None:
    chains = KnownChains()
    for salt, tokens in [*asked, *asked]:
        seed = seed_hash(namespace("m", salt))
        assert chains.chain(seed, tokens).tolist() == chain_hashes(seed, tokens).tolist()


def test_what_prompts_share_is_remembered_once() -> None:
    chains, shared = KnownChains(), np.arange(2 * PIECE_TOKENS, dtype=np.uint32)
    for number in range(10):
        chains.chain(SEED, np.concatenate([shared, np.full(PIECE_TOKENS - 1, number, dtype=np.uint32)]))
    assert len(chains) == 2


def test_endless_distinct_prompts_take_no_endless_memory_and_what_is_asked_for_stays() -> None:
    """Behaviour 49, of the chains."""
    chains, hot = KnownChains(), np.zeros(PIECE_TOKENS, dtype=np.uint32)
    chains.chain(SEED, hot)
    (piece,) = chains._pieces.values()
    for number in range(2 * MOST_PIECES + 10):
        chains.chain(SEED, np.full(PIECE_TOKENS, 1 + number, dtype=np.uint32))
        if number % 1_000 == 0:
            chains.chain(SEED, hot)
    assert len(chains) <= 2 * MOST_PIECES
    assert any(kept is piece for kept in [*chains._pieces.values(), *chains._older.values()])

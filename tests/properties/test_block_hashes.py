"""Block hashes name prefixes: equal exactly as far as the tokens are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, seed_hash

prompts = st.lists(st.sampled_from([0, 1, 2**32 - 1]), max_size=5 * BLOCK_TOKENS).map(
    lambda ids: np.array(ids, np.uint32)
)


@given(shared=prompts, left=prompts, right=prompts)
def test_hashes_agree_exactly_over_the_shared_blocks(shared, left, right):
    seed = seed_hash(("m",))
    first, second = np.concatenate([shared, left]), np.concatenate([shared, right])
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    common = int(differing[0]) if len(differing) else length
    agreeing = (
        chain_hashes(seed, first)[: length // BLOCK_TOKENS] == chain_hashes(seed, second)[: length // BLOCK_TOKENS]
    )
    depth = common // BLOCK_TOKENS
    assert agreeing[:depth].all()
    assert not agreeing[depth:].any()


@given(tokens=prompts, cut=st.integers(0, 5))
def test_a_prefix_has_the_first_hashes_of_the_whole(tokens, cut):
    whole = chain_hashes(seed_hash(()), tokens)
    part = chain_hashes(seed_hash(()), tokens[: cut * BLOCK_TOKENS])
    assert part.tolist() == whole[:cut].tolist()


names = st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=4), max_size=4).map(tuple)


@given(left=names, right=names)
def test_namespaces_share_a_seed_only_when_equal(left, right):
    """Behaviour 27: namespaces are tuples and cannot collide."""
    assert (seed_hash(left) == seed_hash(right)) == (left == right)

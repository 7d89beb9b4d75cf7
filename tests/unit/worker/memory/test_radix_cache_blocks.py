"""Hashes of routing blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from radixfleet.blocks import chain_hashes, seed_hash
from tests.support.prefix_pool import NAMESPACE, Pool


class TestBlockHashes:
    """Routing blocks are 64 tokens, whatever the pages and nodes they lie in."""

    TOKENS = (*range(1000, 1300),)

    def expected(self, tokens: Sequence[int]) -> list[int]:
        return sorted(chain_hashes(seed_hash(NAMESPACE), np.array(tokens, dtype=np.uint32)).tolist())

    @pytest.mark.parametrize("page_size", [1, 2, 16, 64])
    @pytest.mark.parametrize("chunk", [1, 30, 64, 100, 300])
    def test_are_those_of_the_contract_however_the_sequence_came(self, page_size: int, chunk: int) -> None:
        pool = Pool(page_size, num_pages=302)
        sequence = pool.sequence(self.TOKENS)
        while sequence.computed < len(self.TOKENS):
            assert sequence.compute(chunk)
            sequence.insert()
        pool.check()
        assert pool.cache.block_hashes().tolist() == self.expected(self.TOKENS)
        evicted, added = pool.cache.block_events.drain()
        assert (evicted.tolist(), added.tolist()) == ([], self.expected(self.TOKENS))
        sequence.end()

    def test_follow_a_trim_through_a_block(self) -> None:
        pool = Pool(page_size=16, num_pages=30)
        pool.put(self.TOKENS)
        pool.cache.block_events.drain()
        pool.cache.evict(3)
        assert pool.cache.block_hashes().tolist() == self.expected(self.TOKENS[:192])
        evicted, added = pool.cache.block_events.drain()
        assert set(evicted.tolist()) == set(self.expected(self.TOKENS)) - set(self.expected(self.TOKENS[:192]))
        assert len(added) == 0
        pool.put(self.TOKENS)
        pool.check()
        assert pool.cache.block_events.drain()[1].tolist() == evicted.tolist()

    def test_a_block_across_a_fork_belongs_to_its_branch(self) -> None:
        pool = Pool(page_size=16, num_pages=60)
        other = [*self.TOKENS[:96], *range(5000, 5100)]
        pool.put(self.TOKENS)
        pool.put(other)
        pool.check()
        assert set(pool.cache.block_hashes().tolist()) == {*self.expected(self.TOKENS), *self.expected(other)}
        pool.cache.evict(12)
        pool.check()
        kept = self.expected(other)
        assert pool.cache.block_hashes().tolist() == kept

    def test_churn_between_two_reports_does_not_show(self) -> None:
        pool = Pool(page_size=16, num_pages=60)
        pool.put(self.TOKENS)
        pool.cache.flush()
        assert [part.tolist() for part in pool.cache.block_events.drain()] == [[], []]

    def test_a_digest_of_an_empty_cache_is_empty(self) -> None:
        assert Pool().cache.block_hashes().tolist() == []

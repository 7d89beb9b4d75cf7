"""Another engine's KV blocks as our routing blocks. Pure.

Engines hash their blocks in their own ways, of sizes of their own; what they share with us are the tokens. Each block
of theirs ends somewhere in a chain of ours. Kept for each is where it leaves the chain: our last whole block's hash,
and the tokens behind it; so its children go on from there, and a prefix is hashed once, whatever the sizes:

    theirs   [    48    ][    48    ][    48    ][    48    ]
    ours     [      64      ][      64      ][      64      ]
    ends in        -           first         second    third

One of ours is cached while a block of theirs is in which it ends (several may be: copies, or another name for the same
tokens). A block whose parent was never heard of has no known place and is left out, and so are its children.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes
from radixfleet.types import BlockHash, HashArray, TokenArray

_NO_TOKENS: TokenArray = np.zeros(0, dtype=np.uint32)


@dataclass(slots=True)
class _Place:
    """Where a block of theirs ends."""

    chain: BlockHash
    """Our last whole block at or before its end, or the seed."""
    tail: TokenArray
    """Tokens between the two, fewer than a block of ours."""
    ends: list[int]
    """Our blocks that end in it."""
    copies: int = 1


class ForeignBlocks:
    """What one engine holds."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._counts: Counter[int] = Counter()
        self._evicted: set[int] = set()
        self._added: set[int] = set()

    def __len__(self) -> int:
        """Routing blocks."""
        return len(self._counts)

    def store(self, seed: BlockHash, parent: int | None, blocks: Iterable[tuple[int, Sequence[int]]]) -> int:
        """Blocks of theirs, (hash, tokens) each, that follow one another behind `parent`; None: at the beginning.

        `seed` is where a chain of ours begins. Returns how many had no known place.
        """
        place = _Place(seed, _NO_TOKENS, []) if parent is None else self._places.get(parent)
        lost = 0
        for block, token_ids in blocks:
            if place is None:
                lost += 1
                continue
            place = self._put(block, place, np.array(token_ids, dtype=np.uint32))
        return lost

    def _put(self, block: int, parent: _Place, token_ids: TokenArray) -> _Place:
        known = self._places.get(block)
        if known is not None:
            known.copies += 1
            return known
        tokens = np.concatenate([parent.tail, token_ids])
        hashes: list[int] = chain_hashes(parent.chain, tokens).tolist()
        chain = BlockHash(hashes[-1]) if hashes else parent.chain
        place = self._places[block] = _Place(chain, tokens[len(hashes) * BLOCK_TOKENS :], hashes)
        for one in hashes:
            self._counts[one] += 1
            if self._counts[one] == 1:
                _move(one, cancels=self._evicted, else_into=self._added)
        return place

    def remove(self, blocks: Iterable[int]) -> None:
        """Blocks of theirs are gone; those that are not known are passed over."""
        for block in blocks:
            place = self._places.get(block)
            if place is None:
                continue
            place.copies -= 1
            if place.copies:
                continue
            del self._places[block]
            for one in place.ends:
                self._counts[one] -= 1
                if not self._counts[one]:
                    del self._counts[one]
                    _move(one, cancels=self._added, else_into=self._evicted)

    def clear(self) -> None:
        """All are gone."""
        for one in self._counts:
            _move(one, cancels=self._added, else_into=self._evicted)
        self._places.clear()
        self._counts.clear()

    def drain(self) -> tuple[HashArray, HashArray]:
        """(evicted, added) since the last drain: our hashes, without one in common."""
        changes = _sorted(self._evicted), _sorted(self._added)
        self._evicted.clear()
        self._added.clear()
        return changes

    def hashes(self) -> HashArray:
        """All that are held, ascending."""
        return _sorted(self._counts.keys())


def _move(block: int, *, cancels: set[int], else_into: set[int]) -> None:
    if block in cancels:
        cancels.remove(block)
    else:
        else_into.add(block)


def _sorted(blocks: Iterable[int]) -> HashArray:
    array = np.fromiter(blocks, dtype="<u8")
    array.sort()
    return array

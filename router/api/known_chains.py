"""Chains of block hashes that were worked out lately: most prompts begin as others did.

A prompt is looked up in pieces of `PIECE_BLOCKS` blocks. A piece is found by one hash over its tokens, seeded with the
hash of the block before it; so, like a block's hash, that names the whole prompt up to the end of the piece, and two
prompts are taken for one as seldom (2^-64 a pair). It costs a tenth of the hashes of the piece's blocks. From the first
piece that is not known on, the chain is worked out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import xxhash

from radixfleet.blocks import BLOCK_TOKENS, chain_links, token_bytes
from radixfleet.types import BlockHash, HashArray, TokenArray

PIECE_BLOCKS = 16
MOST_PIECES = 4096
"""Twice as many may be kept, 300 bytes each: those that are asked for, and those that lately were."""
_PIECE_TOKENS = PIECE_BLOCKS * BLOCK_TOKENS
_PIECE_BYTES = _PIECE_TOKENS * 4


class _Piece(NamedTuple):
    hashes: bytes
    """Of its blocks, one behind the other."""
    last: BlockHash


class KnownChains:
    """The chains of one model. For any thread: what two learn at once is the same, or is lost and learnt again."""

    def __init__(self) -> None:
        self._pieces: dict[int, _Piece] = {}
        self._older: dict[int, _Piece] = {}

    def __len__(self) -> int:
        return len(self._pieces) + len(self._older)

    def chain(self, seed: BlockHash, tokens: TokenArray) -> HashArray:
        """What `chain_hashes` says; `tokens` from the beginning of a prompt on."""
        data = token_bytes(tokens)
        links: list[bytes] = []
        parent, begin = seed, 0
        for end in range(_PIECE_BYTES, len(data) + 1, _PIECE_BYTES):
            piece = self._find(xxhash.xxh3_64_intdigest(data[begin:end], parent))
            if piece is None:
                break
            links.append(piece.hashes)
            parent, begin = piece.last, end
        rest = chain_links(parent, data[begin:])
        for first in range(0, len(rest) - PIECE_BLOCKS + 1, PIECE_BLOCKS):
            hashes = rest[first : first + PIECE_BLOCKS]
            piece = _Piece(b"".join(hashes), BlockHash(int.from_bytes(hashes[-1], "little")))
            self._keep(xxhash.xxh3_64_intdigest(data[begin : begin + _PIECE_BYTES], parent), piece)
            parent, begin = piece.last, begin + _PIECE_BYTES
        return np.frombuffer(b"".join(links + rest), dtype="<u8")

    def _find(self, key: int) -> _Piece | None:
        found = self._pieces.get(key)
        if found is None and (found := self._older.get(key)) is not None:
            self._keep(key, found)
        return found

    def _keep(self, key: int, piece: _Piece) -> None:
        if len(self._pieces) >= MOST_PIECES:
            self._older, self._pieces = self._pieces, {}
        self._pieces[key] = piece

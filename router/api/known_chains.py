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

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes
from radixfleet.types import BlockHash, TokenArray
from router.dispatch.request import HashArray

PIECE_BLOCKS = 16
MOST_PIECES = 4096
"""Twice as many may be kept, 300 bytes each: those that are asked for, and those that lately were."""
_PIECE_TOKENS = PIECE_BLOCKS * BLOCK_TOKENS
_PIECE_BYTES = _PIECE_TOKENS * 4


class _Piece(NamedTuple):
    hashes: bytes
    """Of its blocks, as uint64."""
    last: BlockHash


class KnownChains:
    """Of one model. On any thread: what two threads learn at once is the same, or lost and learnt again."""

    def __init__(self) -> None:
        self._pieces: dict[int, _Piece] = {}
        self._older: dict[int, _Piece] = {}

    def __len__(self) -> int:
        return len(self._pieces) + len(self._older)

    def chain(self, seed: BlockHash, tokens: TokenArray) -> HashArray:
        """What `chain_hashes` says; `tokens` from the beginning of a prompt on."""
        data = np.ascontiguousarray(tokens, dtype="<u4").data.cast("B")
        known: list[bytes] = []
        parent = seed
        while len(data) - len(known) * _PIECE_BYTES >= _PIECE_BYTES:
            begin = len(known) * _PIECE_BYTES
            key = xxhash.xxh3_64_intdigest(data[begin : begin + _PIECE_BYTES], parent)
            piece = self._pieces.get(key) or self._older.get(key)
            if piece is None:
                piece = self._learn(parent, tokens[begin // 4 : begin // 4 + _PIECE_TOKENS])
            self._keep(key, piece)
            known.append(piece.hashes)
            parent = piece.last
        rest = chain_hashes(parent, tokens[len(known) * _PIECE_TOKENS :])
        return np.concatenate([np.frombuffer(b"".join(known), dtype=np.uint64), rest]) if known else rest

    def _learn(self, parent: BlockHash, tokens: TokenArray) -> _Piece:
        hashes = chain_hashes(parent, tokens)
        return _Piece(hashes.tobytes(), BlockHash(hashes.item(-1)))

    def _keep(self, key: int, piece: _Piece) -> None:
        if key in self._pieces:
            return
        if len(self._pieces) >= MOST_PIECES:
            self._older, self._pieces = self._pieces, {}
        self._pieces[key] = piece

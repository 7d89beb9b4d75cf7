"""The one hash that router and worker compute alike: chained hashes of 64-token routing blocks.

A prompt is cut into blocks of BLOCK_TOKENS tokens; a tail shorter than that has no hash. The hash of block i is
xxh3-64(hash of block i-1 as 8 bytes little-endian || tokens of block i as uint32 little-endian), so it names the whole
prefix up to the block's end: two prompts share a hash at depth i exactly when they share all tokens up to there (but
for collisions, 2^-64 a pair). The chain starts from `seed_hash(namespace)`. Constants and vectors are fixed; a change
of either is a new BLOCK_SCHEME, and digests of different schemes are never compared.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from radixfleet.types import BlockHash, HashArray, TokenArray

BLOCK_TOKENS = 64
BLOCK_SCHEME = 1

_BLOCK_DTYPE = np.dtype(f"V{BLOCK_TOKENS * 4}")
"""A block as one opaque value: numpy cuts the tokens into `bytes` faster than slicing does."""
_TOKEN_DTYPE = np.dtype("<u4")
_HASH_DTYPE = np.dtype("<u8")
_pack_u64 = struct.Struct("<Q").pack


def namespace(model: str, cache_salt: str = "", lora: str = "") -> tuple[str, str, str]:
    """What prefixes are shared within. Router and worker both make it here, so that their hashes agree."""
    return model, lora, cache_salt


def seed_hash(namespace: Sequence[str]) -> BlockHash:
    """The hash that a chain starts from. `namespace` is (model, lora, cache salt); no two collide."""
    parts = [b"radixfleet-blocks", BLOCK_SCHEME.to_bytes(4, "little")]
    for part in namespace:
        encoded = part.encode()
        parts += [len(encoded).to_bytes(8, "little"), encoded]
    return BlockHash(xxhash.xxh3_64_intdigest(b"".join(parts)))


def chain_hashes(parent: BlockHash, tokens: TokenArray) -> HashArray:
    """Hashes of the whole blocks in `tokens`, which must begin at a block boundary, after a block with hash `parent`.

    `tokens`: uint32 (or int32, whose bytes are the same), one dimension. Returns len(tokens) // BLOCK_TOKENS hashes.
    """
    return np.frombuffer(b"".join(chain_links(parent, token_bytes(tokens))), dtype=_HASH_DTYPE).astype(np.uint64)


def token_bytes(tokens: TokenArray) -> memoryview:
    """The tokens as uint32 little-endian, one behind the other."""
    return np.ascontiguousarray(tokens, dtype=_TOKEN_DTYPE).data.cast("B")


def chain_links(parent: BlockHash, data: memoryview) -> list[bytes]:
    """The same hashes of `token_bytes`, each as 8 bytes little-endian: what the next one begins with."""
    blocks = np.frombuffer(data, dtype=_BLOCK_DTYPE, count=len(data) // _BLOCK_DTYPE.itemsize).tolist()
    digest, pack = xxhash.xxh3_64_intdigest, _pack_u64
    link = pack(parent)
    return [(link := pack(digest(link + block))) for block in blocks]

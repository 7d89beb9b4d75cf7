"""Chained block hashes from letters: one letter a block, equal beginnings give equal hashes."""

from __future__ import annotations

import numpy as np
import xxhash

from radixfleet.types import HashArray


def chain(letters: str) -> HashArray:
    """uint64 [letters]: the hash at depth d names the first d letters."""
    prefixes = [letters[:depth].encode() for depth in range(1, len(letters) + 1)]
    return np.array([xxhash.xxh3_64_intdigest(prefix) for prefix in prefixes], dtype=np.uint64)


def blocks(*prefixes: str) -> HashArray:
    """uint64 [prefixes]: the one block that each prefix ends with."""
    return np.array([chain(prefix)[-1] for prefix in prefixes], dtype=np.uint64)


NONE: HashArray = np.empty(0, dtype=np.uint64)

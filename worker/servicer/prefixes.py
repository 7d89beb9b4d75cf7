"""The front's copy of which routing blocks the engine has cached, and the numbered changes to it.

The engine reports changes about every 50 ms; `commit` folds what came since its last call into one change with the next
sequence number. One mirror an incarnation. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np

from radixfleet.types import HashArray


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """One step of the sequence. The two sets are disjoint."""

    sequence: int
    evicted: bytes
    """Block hashes as they travel: unsigned 64-bit, little-endian."""
    added: bytes


class PrefixMirror:
    """Cached block hashes as of `sequence`, and changes not yet numbered."""

    def __init__(self) -> None:
        self.sequence = 0
        self._blocks: set[int] = set()
        self._evicted: set[int] = set()
        """Subset of `_blocks`."""
        self._added: set[int] = set()
        """Disjoint from `_blocks`."""

    @property
    def blocks(self) -> Set[int]:
        """What was cached as of `sequence`. One object, which follows."""
        return self._blocks

    def apply(self, evicted: HashArray, added: HashArray) -> None:
        """Take a report of the engine; its evictions come first."""
        for block in evicted.tolist():
            self._added.discard(block)
            if block in self._blocks:
                self._evicted.add(block)
        for block in added.tolist():
            self._evicted.discard(block)
            if block not in self._blocks:
                self._added.add(block)

    def commit(self) -> PrefixChange | None:
        """Number what has changed since the last call; None when nothing has, on balance."""
        if not self._evicted and not self._added:
            return None
        self.sequence += 1
        change = PrefixChange(self.sequence, _pack(self._evicted), _pack(self._added))
        self._blocks -= self._evicted
        self._blocks |= self._added
        self._evicted, self._added = set(), set()
        return change

    def digest(self) -> bytes:
        """All blocks as of `sequence`, in ascending order."""
        return _pack(self._blocks)


def _pack(blocks: Iterable[int]) -> bytes:
    hashes = np.fromiter(blocks, dtype="<u8")
    hashes.sort()
    return hashes.tobytes()

"""What changed in the set of cached routing blocks since it was last asked for: the deltas that routers follow.

A block that was added and evicted between two drains (or evicted and added again) does not show at all: a delta is
exactly the difference of the two sets, so it stays small under churn and the order in which its two parts are applied
does not matter. Memory between two drains is bounded by the changes that happened; the engine drains with each report.

Routers of ours need hashes alone. Others hash in their own way and need the blocks' tokens, so these are noted while
somebody follows them, and cost nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixfleet.types import BlockHash
from worker.core.messages import BlockRun

HashArray = npt.NDArray[np.uint64]


class BlockEvents:
    """Collects block hashes that the radix cache adds and evicts; a hash is in the cache at most once."""

    def __init__(self) -> None:
        self._added: set[BlockHash] = set()
        self._evicted: set[BlockHash] = set()
        self._runs: list[BlockRun] | None = None

    @property
    def are_followed(self) -> bool:
        """Whether `note` is wanted for what `add` is told."""
        return self._runs is not None

    def follow(self, *, on: bool) -> None:
        """Keep the tokens of blocks that are added from now on, or keep none."""
        self._runs = [] if on else None

    def note(self, run: BlockRun) -> None:
        """The tokens of added blocks. Only while they are followed."""
        assert self._runs is not None, "nobody follows"
        self._runs.append(run)

    def drain_runs(self) -> list[BlockRun] | None:
        """What was noted since the last drain, in order; some of it may have been evicted since. None: not followed."""
        runs = self._runs
        if runs is not None:
            self._runs = []
        return runs

    def add(self, hashes: HashArray) -> None:
        """These blocks are cached from now on."""
        _move(hashes, cancels=self._evicted, else_into=self._added)

    def evict(self, hashes: HashArray) -> None:
        """These blocks are cached no longer."""
        _move(hashes, cancels=self._added, else_into=self._evicted)

    def drain(self) -> tuple[HashArray, HashArray]:
        """(evicted, added) since the last drain: uint64, each sorted ascending, without a hash in common."""
        evicted, added = _sorted(self._evicted), _sorted(self._added)
        self._evicted.clear()
        self._added.clear()
        return evicted, added


def _move(hashes: HashArray, *, cancels: set[BlockHash], else_into: set[BlockHash]) -> None:
    blocks: list[BlockHash] = hashes.tolist()
    if not cancels.isdisjoint(blocks):
        cancelled = cancels.intersection(blocks)
        cancels -= cancelled
        else_into.update(cancelled.symmetric_difference(blocks))
    else:
        else_into.update(blocks)


def _sorted(blocks: set[BlockHash]) -> HashArray:
    array = np.fromiter(blocks, dtype=np.uint64, count=len(blocks))
    array.sort()
    return array

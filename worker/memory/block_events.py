"""What changed in the set of cached routing blocks since it was last asked for: the deltas that routers follow.

A block that was added and evicted between two drains (or evicted and added again) does not show at all: a delta is
exactly the difference of the two sets, so it stays small under churn and the order in which its two parts are applied
does not matter. Memory between two drains is bounded by the changes that happened; the engine drains with each report.

Routers of ours need hashes alone. Others hash in their own way and need the blocks' tokens, so these are noted while
somebody follows them, and cost nothing else.
"""

from __future__ import annotations

import numpy as np

from radixfleet.types import HashArray
from worker.core.messages import BlockRun


class BlockEvents:
    """Collects block hashes that the radix cache adds and evicts; a hash is in the cache at most once.

    They are only put on a pile while the scheduler works, and compared when somebody asks.
    """

    def __init__(self) -> None:
        self._added: list[HashArray] = []
        self._evicted: list[HashArray] = []
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
        self._added.append(hashes)

    def evict(self, hashes: HashArray) -> None:
        """These blocks are cached no longer."""
        self._evicted.append(hashes)

    def drain(self) -> tuple[HashArray, HashArray]:
        """(evicted, added) since the last drain: uint64, each sorted ascending, without a hash in common."""
        if not self._added and not self._evicted:
            return _NO_HASHES, _NO_HASHES
        added, evicted = (np.concatenate([_NO_HASHES, *pile]) for pile in (self._added, self._evicted))
        self._added.clear()
        self._evicted.clear()
        hashes, indices = np.unique(np.concatenate([added, evicted]), return_inverse=True)
        # A block comes and goes by turns: it came once more often than it went, once less often, or as often.
        came = np.bincount(indices[: len(added)], minlength=len(hashes))
        went = np.bincount(indices[len(added) :], minlength=len(hashes))
        return hashes[came < went], hashes[came > went]


_NO_HASHES: HashArray = np.empty(0, dtype=np.uint64)

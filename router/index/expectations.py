"""Blocks of one worker that are only expected: booked or coming, and not there before.

Each of them is settled at some time. For a worker that reports nothing, the end of the request settles its blocks: they
are taken to be cached, unless the request was never computed and no other has booked them; then they are dropped.

For a worker that reports, only a report settles a block. If none of the GRACE_REPORTS reports after the end of the
block's last lease names it, it is dropped, so that a failed request leaves nothing behind. Reports are counted, and not
seconds, so that a worker loses no blocks by being silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from router.index.holds import Holds

GRACE_REPORTS = 3
"""The report on its way when a request ends may be older than the caching of its last blocks; later ones are not."""


class Expectations:
    """The expected blocks of one worker: see the head of the module."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self.blocks: set[int] = set()
        """All expected blocks. Changed by this class alone."""
        self._reports = 0
        self._due: deque[tuple[int, set[int]]] = deque()
        """Number of a report, and what must have come by it: what is expected, not held, and not here again later."""

    def expect(self, blocks: Iterable[int]) -> None:
        """Wait for `blocks`, which are held, or for which `set_due` is called next."""
        self.blocks.update(blocks)

    def among(self, blocks: Iterable[int]) -> list[int]:
        """The part of `blocks` that is expected."""
        return list(filter(self.blocks.__contains__, blocks))

    def settle(self, blocks: Iterable[int]) -> None:
        """Expect `blocks` no more: they have come, or are gone."""
        if self.blocks:
            self.blocks.difference_update(blocks)

    def only(self, blocks: Iterable[int]) -> None:
        """Wait for these and no others; they are held."""
        self.blocks = set(blocks)
        self._due.clear()

    def set_due(self, blocks: list[int]) -> None:
        """Give a date to those of `blocks` that are expected. It means nothing while they are held.

        A lease that ends calls this for all that it alone held.
        """
        due = self._reports + GRACE_REPORTS
        if not self._due or self._due[-1][0] < due:
            self._due.append((due, set()))
        self._due[-1][1].update(blocks)

    def reported(self) -> None:
        """The worker has reported once more."""
        self._reports += 1

    def overdue(self) -> list[int]:
        """What has not come in time; it is to be dropped. A later lease has set a later date, or will when it ends."""
        late: list[int] = []
        while self._due and self._due[0][0] <= self._reports:
            _, blocks = self._due.popleft()
            late += [block for block in blocks & self.blocks if block not in self._holds and not self._is_dated(block)]
        return late

    def dated(self) -> set[int]:
        """Blocks that have a date, if they are expected. O(blocks)."""
        return set().union(*(blocks for _, blocks in self._due))

    def _is_dated(self, block: int) -> bool:
        return any(block in blocks for _, blocks in self._due)

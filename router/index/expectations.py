"""Blocks of one worker that are only expected: booked or coming, and not there before.

Something settles each of them. Without word from the worker the end of its request does: then the block is taken for
cached, unless the request was never computed and nobody else has booked the block, for then it goes. With word from the
worker only a report settles it, which must come within GRACE_REPORTS reports of the end of its last lease, or the block
goes: so a request that failed leaves nothing behind. Reports are counted, not seconds: a silent worker loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from router.index.holds import Holds

GRACE_REPORTS = 3
"""The report on its way when a request ends may be older than the caching of its last blocks; later ones are not."""

_NEVER = 0
"""The date of what is held: it means nothing, and `set_due` gives another."""


class Expectations:
    """See the module."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self.blocks: dict[int, int] = {}
        """Block -> number of the report by which it must have come. Means nothing while the block is held."""
        self._reports = 0
        self._due: deque[tuple[int, set[int]]] = deque()
        """The same by report: no block is due at a report that is not here."""

    def expect(self, blocks: Iterable[int]) -> None:
        """Wait for `blocks`, which are held, or for which `set_due` is called next."""
        self.blocks.update(dict.fromkeys(blocks, _NEVER))

    def among(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that are expected."""
        return list(filter(self.blocks.__contains__, blocks))

    def settle(self, blocks: Iterable[int]) -> None:
        """They have come, or are gone."""
        if self.blocks:
            for block in filter(self.blocks.__contains__, blocks):
                del self.blocks[block]

    def only(self, blocks: Iterable[int]) -> None:
        """Wait for these and no others; they are held."""
        self.blocks = dict.fromkeys(blocks, _NEVER)
        self._due.clear()

    def set_due(self, blocks: list[int]) -> None:
        """Give a date to those of `blocks` that are expected and not held."""
        pending = self._holds.free(self.among(blocks))
        due = self._reports + GRACE_REPORTS
        self.blocks.update(dict.fromkeys(pending, due))
        if self._due and self._due[-1][0] == due:
            self._due[-1][1].update(pending)
        elif pending:
            self._due.append((due, set(pending)))

    def reported(self) -> None:
        """The worker has reported once more."""
        self._reports += 1

    def overdue(self) -> list[int]:
        """What has not come in time; it is to be dropped. A later lease has set a later date, or will when it ends."""
        late: list[int] = []
        while self._due and self._due[0][0] <= self._reports:
            due, blocks = self._due.popleft()
            late += [block for block in blocks if self.blocks.get(block) == due and block not in self._holds]
        return late

    def dated(self) -> set[int]:
        """Blocks that have a date, or had one. O(blocks)."""
        return set().union(*(blocks for _, blocks in self._due))

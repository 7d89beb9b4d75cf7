"""Blocks by their last use: which leave first when room is made.

Every use of a prefix (a request that ended, blocks that the worker reported) has a number, its tick, and leaves a
record: the tick and the blocks, parents first. `last_use` has the tick of each block's last use, so an older record of
the same block is void. To make room, the oldest record gives up blocks from its end, the deepest first, and void ones
are skipped. A use of a deep block is always a use of its parents, so parents outlive children and a prefix shortens
from its end. Void records are swept out when they outnumber the blocks: a use costs O(1) a block, and memory is
O(blocks).

A block that joined and was never used has no record, and one that is held may lose its record: neither leaves to make
room before its next use.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from itertools import compress, filterfalse, repeat

_SWEEP_SLACK = 1024


class UseOrder:
    """The order of last use: see the head of the module. `is_held` says which blocks may not leave to make room."""

    def __init__(self, is_held: Callable[[int], bool]) -> None:
        self._is_held = is_held
        self.last_use: dict[int, int] = {}
        """Block -> tick of its last use, or of when it joined. Written here alone."""
        self._tick = 0
        self._records: deque[tuple[int, array[int]]] = deque()
        self._recorded_blocks = 0

    def missing(self, blocks: list[int]) -> list[int]:
        """The part of `blocks` that is not here."""
        return list(filterfalse(self.last_use.__contains__, blocks))

    def join(self, blocks: list[int]) -> list[int]:
        """Add `blocks`, which have not been used yet. Returns those that were not here before."""
        self._tick += 1
        new = self.missing(blocks)
        self._date(new)
        return new

    def use(self, blocks: list[int]) -> None:
        """Record a use of `blocks`, parents first. Those that were not here join."""
        if not blocks:
            return
        self._tick += 1
        self._date(blocks)
        self._records.append((self._tick, array("Q", blocks)))
        self._recorded_blocks += len(blocks)
        if self._recorded_blocks > 2 * len(self.last_use) + _SWEEP_SLACK:
            self._sweep()

    def drop(self, blocks: Iterable[int]) -> list[int]:
        """Forget `blocks`. Returns those that were here."""
        forget = self.last_use.pop
        return [block for block in blocks if forget(block, None) is not None]

    def take_oldest(self, *, excess: int = 0, until_tick: int = 0) -> list[int]:
        """Forget what is not held, oldest first: `excess` blocks, and all that were last used up to `until_tick`.

        Returns what left.
        """
        dropped: list[int] = []
        records, last_use, is_held = self._records, self.last_use, self._is_held
        while records and (len(dropped) < excess or records[0][0] <= until_tick):
            tick, run = records[0]
            block = run.pop()
            self._recorded_blocks -= 1
            if not run:
                records.popleft()
            if last_use.get(block) == tick and not is_held(block):
                dropped.append(block)
                del last_use[block]
        return dropped

    def first_to_leave(self, count: int) -> set[int]:
        """The `count` blocks that `take_oldest` would take. What is void among their records is forgotten."""
        going: set[int] = set()
        looked_at: list[tuple[int, array[int]]] = []
        while self._records and len(going) < count:
            tick, run = self._records.popleft()
            live = self._live(tick, run)
            self._recorded_blocks -= len(run) - len(live)
            if live:
                looked_at.append((tick, live))
            free = list(filterfalse(self._is_held, live))
            going.update(free[max(0, len(free) + len(going) - count) :])
        self._records.extendleft(reversed(looked_at))
        return going

    def recorded(self) -> set[int]:
        """Blocks that can leave to make room, once they are not held. Raises AssertionError when the books are wrong.

        O(blocks).
        """
        if self._recorded_blocks != sum(len(run) for _, run in self._records):
            raise AssertionError("the count of recorded blocks is wrong")
        return {block for tick, run in self._records for block in run if self.last_use.get(block) == tick}

    def _date(self, blocks: list[int]) -> None:
        last_use, tick = self.last_use, self._tick
        for block in blocks:  # in half the time of `update` with `dict.fromkeys`
            last_use[block] = tick

    def _sweep(self) -> None:
        """Forget void records."""
        live = ((tick, self._live(tick, run)) for tick, run in self._records)
        self._records = deque((tick, run) for tick, run in live if run)
        self._recorded_blocks = sum(len(run) for _, run in self._records)

    def _live(self, tick: int, run: array[int]) -> array[int]:
        """What a record still counts for."""
        return array("Q", compress(run, map(tick.__eq__, map(self.last_use.get, run, repeat(0)))))

"""Which blocks of one worker are held: requests in flight use them, so they are never dropped to make room.

Our own requests lease their blocks, and are counted: `leased`. Of the prompts that others sent the worker tells when it
has accepted them, and their blocks are `coming` until they are cached, or come no more; nobody knows when those
requests end, so they count as users of nothing.

Leases are counted by stretches. Whoever leases a block leases all before it, so along a prompt the same requests use
one block after another, until somebody's prompt ends or parts: that is one stretch, with one count. A request that
joins or leaves costs a step for each stretch of its prompt, and work for each block that it alone uses; what hundreds
share is counted in one number, however long it is. A stretch in which a new prompt parts is cut there, for good, and
the shorter of both parts gets the new label: cuts cost half a stretch at most, and a stretch of n blocks n log2(n)/2
for all the cuts that it can get.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.index.depth import depth_of


@dataclass(slots=True, eq=False)
class Stretch:
    """Blocks [begin, end) of a prompt, which the same requests use."""

    begin: int
    end: int
    users: int
    since_s: float
    """When the first of the leases came without which the blocks would have been free since."""
    blocks: list[int]
    """The blocks of the stretch, in order."""


class Holds:
    """What is held of one worker's blocks: see the module."""

    def __init__(self) -> None:
        self.leased: dict[int, Stretch] = {}
        """The blocks that our running requests use. Written here alone, as is the next one."""
        self.coming: dict[int, None] = {}
        """What the worker says that it is going to compute, in its order. Empty without word from it."""
        self._foreign: set[int] = set()
        """What is coming and not leased."""

    def __contains__(self, block: object) -> bool:
        return block in self.leased or block in self.coming

    def lease(self, blocks: list[int], now_s: float) -> list[int]:
        """One more request uses these leading blocks of its prompt. Returns those that nobody leased."""
        leased, count, depth = self.leased, len(blocks), 0
        while depth < count and (stretch := leased.get(blocks[depth])) is not None:
            depth = stretch.end
            if depth > count or leased.get(blocks[depth - 1]) is not stretch:
                stretch = self._cut(blocks, stretch)
                depth = stretch.end
            stretch.users += 1
        alone = blocks[depth:]
        if alone:
            self._label(Stretch(depth, count, 1, now_s, alone.copy()))
            if self._foreign:
                self._foreign.difference_update(alone)
        return alone

    def unlease(self, blocks: list[int]) -> list[int]:
        """A request that leased these blocks has ended. Returns those that it alone used, which are the last ones."""
        leased, count, depth = self.leased, len(blocks), 0
        while depth < count and (stretch := leased[blocks[depth]]).users > 1:
            stretch.users -= 1
            depth = stretch.end
        alone = blocks[depth:]
        for block in alone:
            del leased[block]
        if self.coming:
            self._foreign.update(filter(self.coming.__contains__, alone))
        return alone

    def come(self, blocks: list[int]) -> None:
        """The worker is going to compute these blocks."""
        self.coming.update(dict.fromkeys(blocks))
        self._foreign.update(block for block in blocks if block not in self.leased)

    def come_no_more(self, blocks: list[int]) -> None:
        """These blocks are coming no longer: they were computed, or never will be."""
        if self.coming:
            for block in blocks:
                self.coming.pop(block, None)
            self._foreign.difference_update(blocks)

    def nothing_comes(self) -> dict[int, None]:
        """There is no word from the worker any more. Returns what was coming."""
        came, self.coming = self.coming, {}
        self._foreign.clear()
        return came

    def users(self, block: int) -> int:
        """How many of our running requests use it."""
        stretch = self.leased.get(block)
        return 0 if stretch is None else stretch.users

    def used_since_s(self, block: int) -> float | None:
        """Since when there has always been one of them; None: there is none now."""
        stretch = self.leased.get(block)
        return None if stretch is None else stretch.since_s

    @property
    def foreign_blocks(self) -> int:
        """Number of blocks that are coming only because other routers sent prompts with them."""
        return len(self._foreign)

    def free(self, blocks: list[int]) -> list[int]:
        """The part of `blocks` that is not held."""
        leased, coming = self.leased, self.coming
        if leased.keys().isdisjoint(blocks) and coming.keys().isdisjoint(blocks):
            return blocks
        return [block for block in blocks if block not in leased and block not in coming]

    def check(self) -> None:
        """Raise AssertionError when the books do not agree. O(blocks)."""
        labelled: dict[Stretch, set[int]] = {}
        for block, stretch in self.leased.items():
            labelled.setdefault(stretch, set()).add(block)
        for stretch, blocks in labelled.items():
            if not stretch.end - stretch.begin == len(stretch.blocks) == len(blocks) or blocks != set(stretch.blocks):
                raise AssertionError("a stretch is not as long as it has blocks")
        if any(stretch.users <= 0 for stretch in labelled):
            raise AssertionError("a lease count is not positive")
        if self._foreign != self.coming.keys() - self.leased.keys():
            raise AssertionError("what comes with the prompts of others is wrong")

    def _cut(self, blocks: list[int], stretch: Stretch) -> Stretch:
        """The leading part of a stretch, as far as `blocks` go along with it, as one of its own."""
        begin, own, leased = stretch.begin, stretch.blocks, self.leased
        along = blocks[begin : stretch.end]
        shared = depth_of(along, len(along), lambda block: leased.get(block) is stretch)
        head, tail = stretch, stretch
        if shared <= len(own) - shared:
            head = Stretch(begin, begin + shared, stretch.users, stretch.since_s, own[:shared])
            self._label(head)
            tail.begin = head.end
            del own[:shared]
        else:
            tail = Stretch(begin + shared, stretch.end, stretch.users, stretch.since_s, own[shared:])
            self._label(tail)
            head.end = tail.begin
            del own[shared:]
        return head

    def _label(self, stretch: Stretch) -> None:
        leased = self.leased
        for block in stretch.blocks:  # in half the time of `update` with `dict.fromkeys`
            leased[block] = stretch

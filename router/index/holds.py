"""Which blocks of one worker are held: requests in flight use them, so they are never dropped to make room.

Our own requests lease their blocks, and are counted: `leased`. Of the prompts that others sent the worker tells when it
has accepted them, and their blocks are `coming` until they are cached, or come no more; nobody knows when those
requests end, so they count as users of nothing.
"""

from __future__ import annotations

from bisect import bisect_left

from router.index.depth import depth_of


class Holds:
    """See the module."""

    def __init__(self) -> None:
        self.leased: dict[int, int] = {}
        """Block -> how many of our running requests use it. Written here alone, as are the next two."""
        self.leased_since_s: dict[int, float] = {}
        """When the first of the leases came without which the block would have been free since."""
        self.coming: dict[int, None] = {}
        """What the worker says that it is going to compute, in its order. Empty without word from it."""
        self._foreign: set[int] = set()
        """What is coming and not leased."""

    def __contains__(self, block: object) -> bool:
        return block in self.leased or block in self.coming

    def lease(self, blocks: list[int], now_s: float) -> None:
        """One more request uses these leading blocks of its prompt. Whoever leases a block leases all before it."""
        leased = self.leased
        shared = depth_of(blocks, len(blocks), leased.__contains__)
        for block in blocks[:shared]:
            leased[block] += 1
        alone = blocks[shared:]
        leased.update(dict.fromkeys(alone, 1))
        self.leased_since_s.update(dict.fromkeys(alone, now_s))
        if self._foreign:
            self._foreign.difference_update(blocks)

    def unlease(self, blocks: list[int]) -> None:
        """A request that leased these blocks has ended. Those that it alone used are the last ones."""
        leased, since_s = self.leased, self.leased_since_s
        shared = bisect_left(blocks, -1, key=lambda block: -leased[block])
        for block in blocks[:shared]:
            leased[block] -= 1
        alone = blocks[shared:]
        for block in alone:
            del leased[block], since_s[block]
        if self.coming:
            self._foreign.update(filter(self.coming.__contains__, alone))

    def come(self, blocks: list[int]) -> None:
        """The worker is going to compute these blocks."""
        self.coming.update(dict.fromkeys(blocks))
        self._foreign.update(block for block in blocks if block not in self.leased)

    def come_no_more(self, blocks: list[int]) -> None:
        """It has computed them, or never will."""
        if self.coming:
            for block in blocks:
                self.coming.pop(block, None)
            self._foreign.difference_update(blocks)

    def nothing_comes(self) -> dict[int, None]:
        """There is no word from the worker any more. Returns what was coming."""
        came, self.coming = self.coming, {}
        self._foreign.clear()
        return came

    @property
    def foreign_blocks(self) -> int:
        """How many blocks come with prompts that only others sent."""
        return len(self._foreign)

    def free(self, blocks: list[int]) -> list[int]:
        """Those of `blocks` that are not held."""
        leased, coming = self.leased, self.coming
        if leased.keys().isdisjoint(blocks) and coming.keys().isdisjoint(blocks):
            return blocks
        return [block for block in blocks if block not in leased and block not in coming]

    def check(self) -> None:
        """Raise AssertionError when the books do not agree. O(blocks)."""
        if any(count <= 0 for count in self.leased.values()):
            raise AssertionError("a lease count is not positive")
        if self.leased.keys() != self.leased_since_s.keys():
            raise AssertionError("a lease has no beginning")
        if self._foreign != self.coming.keys() - self.leased.keys():
            raise AssertionError("what comes with the prompts of others is wrong")

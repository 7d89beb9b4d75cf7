"""What one worker is thought to hold: a set of blocks, bounded, and what is needed to keep it true.

Four parts: the order in which blocks leave (`use_order`), what requests in flight hold (`holds`), what is expected and
not settled (`expectations`), and here the bound, the reports, and foresight.

The bound. Without word from the worker it is the modelled capacity, which begins as the reported one, shrinks when a
receipt shows that blocks were gone which the model still held, and grows back slowly with receipts that agree. With
word from the worker evictions are the worker's to tell, and the bound only guards the router's memory; it is twice
the capacity, because blocks that part in the middle share pages.

Foresight. A full worker makes room for what it begins, so what waits there drives out what is here now. `lasting` says
how much of a prefix is going to be left when its request is begun. Nothing is dropped for it, because a request whose
prefix is about to go is still best sent there: it is computed again in the same place, or comes in time after all.
(Dropped when they are booked away, prefixes of 1.5 times the fleet's KV at load 0.9 cost 3 to 17 % in mean time to
first token.)

Methods that change the set return the blocks that left or joined it, and `Sketch` keeps its map in step with that.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.index.depth import depth_of
from router.index.expectations import Expectations
from router.index.holds import Holds
from router.index.use_order import UseOrder

_RECOVERY = 256


class Mirror:
    """The blocks of one incarnation of one worker. Used by `Sketch` alone."""

    def __init__(self, capacity_blocks: int, incarnation: int | None = None) -> None:
        self.incarnation = incarnation
        self.sequence: int | None = None
        """Number of the last report; None while there is no word from the worker to go by."""
        self.capacity_blocks = capacity_blocks
        self.modelled_blocks = capacity_blocks
        self._holds = Holds()
        self._order = UseOrder(self._holds.__contains__)
        self._expected = Expectations(self._holds)
        self._reported_blocks = 0
        """How many the worker held at its last report: more than its capacity, where blocks share pages."""
        self._to_begin: dict[int, int] = {}
        """Blocks that come with booked requests which have not begun, by the depth to which their prompts were here."""

    def __len__(self) -> int:
        return len(self._order.last_use)

    def __contains__(self, block: int) -> bool:
        return block in self._order.last_use

    def blocks(self) -> Iterable[int]:
        """All blocks, in no order."""
        return self._order.last_use.keys()

    def users(self, block: int) -> int:
        """Running requests that use `block`."""
        return self._holds.users(block)

    def used_since_s(self, block: int) -> float | None:
        """Since when there has always been a running request that uses `block`; None: there is none now."""
        return self._holds.used_since_s(block)

    @property
    def bound_blocks(self) -> int:
        """How many blocks it holds at most, but for leased ones."""
        return self.modelled_blocks if self.sequence is None else 2 * self.capacity_blocks

    def set_capacity(self, capacity_blocks: int) -> None:
        """Take over the capacity that the worker reported. What receipts taught is kept where it still makes sense."""
        taught = self.modelled_blocks < self.capacity_blocks
        self.capacity_blocks = capacity_blocks
        if taught:
            self.modelled_blocks = min(max(self.modelled_blocks, self._floor()), capacity_blocks)
        else:
            self.modelled_blocks = capacity_blocks

    def depth(self, blocks: list[int]) -> int:
        """How many leading `blocks` are here, by binary search: presence is monotone in depth."""
        return depth_of(blocks, len(blocks), self._order.last_use.__contains__)

    def lasting(self, blocks: list[int], known: int) -> int:
        """How many of the leading `blocks`, of which `known` are here, are still here when a request begins with them.

        What it waits for is what was booked before and is begun before it, and a worker begins first what has most of
        its prompt cached. Of the prompts that others sent nobody knows how much was cached: but one of which much was
        brings little, so all that they bring is taken to come after it. Without word from the worker, what is booked
        has driven out the rest already.
        """
        excess = len(self) - max(self.capacity_blocks, self._reported_blocks)
        if self.sequence is None or excess <= 0 or not known or blocks[known - 1] in self._holds.leased:
            return known
        excess -= sum(count for depth, count in self._to_begin.items() if depth < known) + self._holds.foreign_blocks
        going = self._order.first_to_leave(excess)
        return depth_of(blocks, known, lambda block: block not in going)

    def settled_use(self, block: int) -> int | None:
        """Tick of the last use of `block`; None while it is only expected."""
        return None if block in self._expected.blocks else self._order.last_use[block]

    def lease(self, blocks: list[int], known: int, now_s: float) -> list[int]:
        """Count one more running request on `blocks`, of which `known` were here. Returns the blocks that joined.

        Call `begun` with their number when the worker begins the request.
        """
        # What others lease is here.
        new = self._order.join(self._holds.lease(blocks, now_s))
        self._expected.expect(new)
        if new:
            self._to_begin[known] = self._to_begin.get(known, 0) + len(new)
        return new

    def begun(self, known: int, joined: int) -> None:
        """The worker has begun a request, or never will, that was leased with `known` blocks and brought `joined`."""
        if joined:
            left = self._to_begin.pop(known) - joined
            if left:
                self._to_begin[known] = left

    def release(self, blocks: list[int], output_blocks: list[int]) -> list[int]:
        """End the lease of a request that was computed, `output_blocks` included. Returns the blocks that joined.

        What other requests lease stays, whenever it was last used, and they will tell of its use when they end. Only
        receipts ask sooner, of a worker that gives no word.
        """
        alone = self._holds.unlease(blocks)
        used = (blocks if self.sequence is None else alone) + output_blocks
        new = self._order.missing(output_blocks)  # leased blocks are here
        self._order.use(used)
        if self.sequence is None:
            self._expected.settle(used)
        else:
            self._expected.expect(new)
            self._expected.set_due(used)
        return new

    def abandon(self, blocks: list[int]) -> list[int]:
        """End the lease of a request that was never computed. Returns the blocks that left."""
        return self._give_up(self._holds.unlease(blocks))

    def trim(self) -> list[int]:
        """Make room down to the bound: least recently used first, deepest first. Returns the blocks that left."""
        excess = len(self) - self.bound_blocks
        return self._take_oldest(excess=excess) if excess > 0 else []

    def correct(self, missing_blocks: int, last_use: int) -> list[int]:
        """The worker had lost `missing_blocks` blocks that were last used at `last_use`. Returns the blocks that left.

        A worker that evicts in order of use has then lost all that was used no later, the deeper blocks of the same
        prefix among it; and it holds less than was thought.
        """
        self.modelled_blocks = max(self.modelled_blocks - missing_blocks, self._floor())
        return self._take_oldest(until_tick=last_use) + self.trim()

    def agree(self) -> None:
        """The worker had what was predicted: let the modelled capacity grow back a little."""
        gap = self.capacity_blocks - self.modelled_blocks
        self.modelled_blocks += min(gap, 1 + gap // _RECOVERY)

    def replace(self, sequence: int, blocks: list[int]) -> tuple[list[int], list[int]]:
        """The worker's whole list. Returns the blocks that left and those that joined.

        Leased blocks that are not in it stay, as expected ones: their requests are in flight. What is coming the worker
        tells anew.
        """
        self.sequence = sequence
        came = self._holds.nothing_comes()
        reported = dict.fromkeys(blocks)
        self._expected.only(block for block in self._holds.leased if block not in reported)
        here, expected = self._order.last_use, self._expected.blocks
        dropped = self._order.drop([block for block in here if block not in reported and block not in expected])
        self._reported_blocks = len(reported)
        used = [block for block in reported if block not in here or block in came]
        new = self._order.missing(used)
        self._order.use(used)
        return dropped, new

    def change(self, sequence: int, evicted: list[int], added: list[int]) -> tuple[list[int], list[int]]:
        """One report of the worker, evictions first. Returns the blocks that left and those that joined."""
        self.sequence = sequence
        self._expected.reported()
        # Held ones were booked after the worker evicted them: their requests compute them anew, and it will say so.
        free = self._holds.free(evicted)
        if len(free) < len(evicted):
            self._expected.expect(filter(self._holds.__contains__, evicted))
        dropped = self._drop(free)
        new = self._order.missing(added)
        self._order.use(added)
        self._expected.settle(added)
        self._holds.come_no_more(added)
        self._reported_blocks = len(self) - len(self._expected.blocks)
        return dropped, new

    def come(self, blocks: list[int]) -> list[int]:
        """The worker has accepted prompts of which it has to compute `blocks`. Returns the blocks that joined."""
        new = self._order.join(blocks)
        self._expected.expect(new)
        self._holds.come(blocks)
        return new

    def come_no_more(self, blocks: list[int]) -> list[int]:
        """The worker has announced that `blocks` come no more and were not computed. Returns the blocks that left."""
        gone = [block for block in blocks if block in self._holds.coming]
        self._holds.come_no_more(gone)
        return self._give_up(gone)

    def expire(self) -> list[int]:
        """Drop what was expected and has not come in time. Returns the blocks that left."""
        return self._drop(self._expected.overdue())

    def lose_truth(self) -> None:
        """The worker reports no more: what was expected of requests that have ended is taken to be cached."""
        self.sequence = None
        leased = self._holds.leased
        self._order.use([block for block in self._holds.nothing_comes() if block not in leased])
        self._expected.only([block for block in self._expected.blocks if block in leased])

    def check(self) -> None:
        """Raise AssertionError when the books do not agree. O(blocks)."""
        self._holds.check()
        leased, coming, expected = self._holds.leased.keys(), self._holds.coming.keys(), self._expected.blocks
        here, recorded, held = self._order.last_use.keys(), self._order.recorded(), leased | coming
        is_full = len(self) > max(self.bound_blocks, len(held))
        faults = {
            "a block can never be dropped": here - recorded - held,
            "a leased block is missing": leased - here,
            "a coming block is missing": coming - here,
            "a block comes without word from the worker": coming if self.sequence is None else set(),
            "an expected block is missing": expected - here,
            "an expected block is never due": expected - held - self._expected.dated(),
            "more blocks than the bound allows": recorded - held if is_full else set(),
        }
        for fault, blocks in faults.items():
            if blocks:
                raise AssertionError(f"{fault}: {sorted(blocks)[:8]}")

    def _floor(self) -> int:
        """What receipts can teach at least. Half of the true capacity costs .03 of hit rate; too much costs nothing."""
        return self.capacity_blocks // 2

    def _take_oldest(self, *, excess: int = 0, until_tick: int = 0) -> list[int]:
        dropped = self._order.take_oldest(excess=excess, until_tick=until_tick)
        self._expected.settle(dropped)
        return dropped

    def _give_up(self, blocks: list[int]) -> list[int]:
        """Nobody computes `blocks` that nothing else holds: those that are only expected leave, and are returned."""
        dropped = self._drop(self._holds.free(self._expected.among(blocks)))
        self._order.use(list(filter(self._order.last_use.__contains__, blocks)))
        return dropped

    def _drop(self, blocks: list[int]) -> list[int]:
        """Returns those of `blocks` that were here."""
        dropped = self._order.drop(blocks)
        self._expected.settle(dropped)
        return dropped

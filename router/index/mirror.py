"""What one worker is thought to hold: a set of blocks, bounded, and what is needed to keep it true.

The order of eviction. Every use of a prefix (a request that ended, blocks that the worker reported) has a number, its
tick, and leaves a record: the tick and the blocks, parents first. `_last_use` has the tick of each block's last use,
so an older record of the same block is void. To make room, the oldest record gives up blocks from its end, the
deepest first, and void ones are skipped. A use of a deep block is always a use of its parents, so parents outlive
children and a prefix shortens from its end. Void records are swept out when they outnumber the blocks: a use costs
O(1) a block, and memory is O(blocks).

Leases. `_leased` counts the running requests that use a block. A leased block is never dropped to make room. It may
lose its record meanwhile: the end of the lease is a use and leaves a new one.

Coming blocks. With word from it, a worker tells of the prompts that it is going to compute, whoever sent them, and
their blocks (`_coming`) are kept as leased ones are, until it says that they are cached, or come no more. Only our own
leases count as users of a block: of the others nobody knows when they end.

Expected blocks. A booked or coming block that was not there before is only expected (`_expected`) until something
settles it. Without word from the worker the end of its request does: then the block is taken for cached, unless the
request was never computed and nobody else has booked the block, for then it goes. With word from the worker only a
report settles it, which must come within GRACE_REPORTS reports of the last lease's end, or the block goes: so a request
that failed leaves nothing behind. Reports are counted, not seconds: a silent worker loses nothing.

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

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from itertools import compress, filterfalse, repeat
from operator import neg

GRACE_REPORTS = 3
"""The report on its way when a request ends may be older than the caching of its last blocks; later ones are not."""

_SWEEP_SLACK = 1024
_RECOVERY = 256


class Mirror:
    """The blocks of one incarnation of one worker. Used by `Sketch` alone."""

    def __init__(self, capacity_blocks: int, incarnation: int | None = None) -> None:
        self.incarnation = incarnation
        self.sequence: int | None = None
        """Number of the last report; None while there is no word from the worker to go by."""
        self.capacity_blocks = capacity_blocks
        self.modelled_blocks = capacity_blocks
        self._tick = 0
        self._last_use: dict[int, int] = {}
        self._records: deque[tuple[int, array[int]]] = deque()
        self._recorded_blocks = 0
        self._leased: dict[int, int] = {}
        self._leased_since_s: dict[int, float] = {}
        """When the first of the leases came without which the block would have been free since."""
        self._coming: dict[int, None] = {}
        """What the worker says that it is going to compute, in its order. Empty without word from it."""
        self._reports = 0
        self._expected: dict[int, int] = {}
        """Block -> number of the report by which it must have come. Means nothing while the block is held."""
        self._due: deque[tuple[int, set[int]]] = deque()
        """The same by report: no block is due at a report that is not here."""
        self._reported_blocks = 0
        """How many the worker held at its last report: more than its capacity, where blocks share pages."""
        self._to_begin: dict[int, int] = {}
        """Blocks that come with booked requests which have not begun, by the depth to which their prompts were here."""

    def __len__(self) -> int:
        return len(self._last_use)

    def __contains__(self, block: int) -> bool:
        return block in self._last_use

    def blocks(self) -> Iterable[int]:
        """All blocks, in no order."""
        return self._last_use.keys()

    @property
    def leased_blocks(self) -> int:
        """Blocks that running requests use."""
        return len(self._leased)

    def users(self, block: int) -> int:
        """Running requests that use `block`."""
        return self._leased.get(block, 0)

    def used_since_s(self, block: int) -> float | None:
        """Since when there has always been a running request that uses `block`; None: there is none now."""
        return self._leased_since_s.get(block)

    @property
    def bound_blocks(self) -> int:
        """How many blocks it holds at most, but for leased ones."""
        return self.modelled_blocks if self.sequence is None else 2 * self.capacity_blocks

    def _is_held(self, block: int) -> bool:
        """Whether a request that is in flight keeps the block: ours, or one that the worker told of."""
        return block in self._leased or block in self._coming

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
        return _depth(blocks, len(blocks), self._last_use.__contains__)

    def lasting(self, blocks: list[int], known: int) -> int:
        """How many of the leading `blocks`, of which `known` are here, are still here when a request begins with them.

        What it waits for is what was booked before and is begun before it, and a worker begins first what has most of
        its prompt cached. Without word from the worker, what is booked has driven out the rest already.
        """
        excess = len(self._last_use) - max(self.capacity_blocks, self._reported_blocks)
        if self.sequence is None or excess <= 0 or not known or blocks[known - 1] in self._leased:
            return known
        excess -= sum(count for depth, count in self._to_begin.items() if depth < known)
        going = self._next_to_go(excess)
        return _depth(blocks, known, lambda block: block not in going)

    def settled_use(self, block: int) -> int | None:
        """Tick of the last use of `block`; None while it is only expected."""
        return None if block in self._expected else self._last_use[block]

    def lease(self, blocks: list[int], known: int, now_s: float) -> list[int]:
        """Count one more running request on `blocks`, of which `known` were here. Returns the blocks that joined.

        Call `begun` with their number when the worker begins the request.
        """
        self._tick += 1
        new = self._missing(blocks)
        self._last_use.update(dict.fromkeys(new, self._tick))
        self._expected.update(dict.fromkeys(new, 0))
        leased = self._leased
        # Whoever leases a block leases all before it.
        shared = _depth(blocks, len(blocks), leased.__contains__)
        for block in blocks[:shared]:
            leased[block] += 1
        alone = blocks[shared:]
        leased.update(dict.fromkeys(alone, 1))
        self._leased_since_s.update(dict.fromkeys(alone, now_s))
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
        """End the lease of a request that was computed, `output_blocks` included. Returns the blocks that joined."""
        self._unlease(blocks)
        used = blocks + output_blocks
        new = self._missing(output_blocks)  # leased blocks are here
        self._record(used)
        if self.sequence is None:
            self._settle(used)
        else:
            self._expected.update(dict.fromkeys(new, 0))
            self._set_due(used)
        return new

    def abandon(self, blocks: list[int]) -> list[int]:
        """End the lease of a request that was never computed. Returns the blocks that left."""
        self._unlease(blocks)
        return self._give_up(blocks)

    def trim(self) -> list[int]:
        """Make room down to the bound: least recently used first, deepest first. Returns the blocks that left."""
        return self._take_oldest(excess=len(self._last_use) - self.bound_blocks)

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
        came, self._coming = self._coming, {}
        reported = dict.fromkeys(blocks)
        self._expected = {block: 0 for block in self._leased if block not in reported}
        self._due.clear()
        dropped = [block for block in self._last_use if block not in reported and block not in self._expected]
        self._drop(dropped)
        self._reported_blocks = len(reported)
        return dropped, self._use([block for block in reported if block not in self._last_use or block in came])

    def change(self, sequence: int, evicted: list[int], added: list[int]) -> tuple[list[int], list[int]]:
        """One report of the worker, evictions first. Returns the blocks that left and those that joined."""
        self.sequence = sequence
        self._reports += 1
        dropped = []
        leased, coming = self._leased, self._coming
        for block in evicted:
            if block in leased or block in coming:
                # Booked after the worker evicted it: the request computes it anew, and the worker will say so.
                self._expected[block] = 0
            elif self._last_use.pop(block, None) is not None:
                self._expected.pop(block, None)
                dropped.append(block)
        new = self._use(added)
        self._settle(added)
        self._come_no_more(added)
        self._reported_blocks = len(self._last_use) - len(self._expected)
        return dropped, new

    def come(self, blocks: list[int]) -> list[int]:
        """The worker has accepted prompts of which it has to compute `blocks`. Returns the blocks that joined."""
        self._tick += 1
        new = self._missing(blocks)
        self._last_use.update(dict.fromkeys(new, self._tick))
        self._expected.update(dict.fromkeys(new, 0))
        self._coming.update(dict.fromkeys(blocks))
        return new

    def go(self, blocks: list[int]) -> list[int]:
        """Those `blocks` come no more, and were not computed. Returns the blocks that left."""
        gone = [block for block in blocks if block in self._coming]
        self._come_no_more(gone)
        return self._give_up(gone)

    def expire(self) -> list[int]:
        """Drop what was expected and has not come in time. Returns the blocks that left."""
        dropped: list[int] = []
        while self._due and self._due[0][0] <= self._reports:
            due, blocks = self._due.popleft()
            # A later lease has set a later date, or will when it ends.
            dropped += [block for block in blocks if self._expected.get(block) == due and not self._is_held(block)]
        self._drop(dropped)
        return dropped

    def lose_truth(self) -> None:
        """There is no word from the worker from now on: what was expected of ended requests is taken for cached."""
        self.sequence = None
        self._record([block for block in self._coming if block not in self._leased])
        self._coming.clear()
        self._expected = {block: 0 for block in self._expected if block in self._leased}
        self._due.clear()

    def check(self) -> None:
        """Raise AssertionError when the books do not agree. O(blocks)."""
        held = self._leased.keys() | self._coming.keys()
        recorded = {block for tick, run in self._records for block in run if self._last_use.get(block) == tick}
        faults = {
            "a block can never be dropped": self._last_use.keys() - recorded - held,
            "a leased block is missing": self._leased.keys() - self._last_use.keys(),
            "a coming block is missing": self._coming.keys() - self._last_use.keys(),
            "a block comes without word from the worker": self._coming.keys() if self.sequence is None else set(),
            "a lease count is not positive": {block for block, count in self._leased.items() if count <= 0},
            "a lease has no beginning": self._leased.keys() ^ self._leased_since_s.keys(),
            "an expected block is missing": self._expected.keys() - self._last_use.keys(),
            "an expected block is never due": self._expected.keys()
            - held
            - set().union(*(blocks for _, blocks in self._due)),
            "more blocks than the bound allows": recorded - held
            if len(self._last_use) > max(self.bound_blocks, len(held))
            else set(),
        }
        for fault, blocks in faults.items():
            if blocks:
                raise AssertionError(f"{fault}: {sorted(blocks)[:8]}")
        if self._recorded_blocks != sum(len(run) for _, run in self._records):
            raise AssertionError("the count of recorded blocks is wrong")

    def _floor(self) -> int:
        """What receipts can teach at least. Half of the true capacity costs .03 of hit rate; too much costs nothing."""
        return self.capacity_blocks // 2

    def _use(self, blocks: list[int]) -> list[int]:
        """Record a use of `blocks`, parents first. Returns those that joined."""
        new = self._missing(blocks)
        self._record(blocks)
        return new

    def _missing(self, blocks: list[int]) -> list[int]:
        """Those of `blocks` that are not here."""
        return list(filterfalse(self._last_use.__contains__, blocks))

    def _record(self, blocks: list[int]) -> None:
        if not blocks:
            return
        self._tick += 1
        self._last_use.update(dict.fromkeys(blocks, self._tick))
        self._records.append((self._tick, array("Q", blocks)))
        self._recorded_blocks += len(blocks)
        if self._recorded_blocks > 2 * len(self._last_use) + _SWEEP_SLACK:
            self._sweep()

    def _sweep(self) -> None:
        """Forget void records."""
        live = ((tick, self._live(tick, run)) for tick, run in self._records)
        self._records = deque((tick, run) for tick, run in live if run)
        self._recorded_blocks = sum(len(run) for _, run in self._records)

    def _live(self, tick: int, run: array[int]) -> array[int]:
        """What a record still counts for."""
        return array("Q", compress(run, map(tick.__eq__, map(self._last_use.get, run, repeat(0)))))

    def _next_to_go(self, count: int) -> set[int]:
        """The `count` blocks that leave first, if room is made. What is void among their records is forgotten."""
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

    def _take_oldest(self, *, excess: int = 0, until_tick: int = 0) -> list[int]:
        """Drop unleased blocks, oldest first: `excess` of them, and all that were last used up to `until_tick`."""
        dropped: list[int] = []
        records, last_use, expected = self._records, self._last_use, self._expected
        leased, coming = self._leased, self._coming
        while records and (len(dropped) < excess or records[0][0] <= until_tick):
            tick, run = records[0]
            block = run.pop()
            self._recorded_blocks -= 1
            if not run:
                records.popleft()
            if last_use.get(block) == tick and block not in leased and block not in coming:
                dropped.append(block)
                del last_use[block]
                expected.pop(block, None)
        return dropped

    def _give_up(self, blocks: list[int]) -> list[int]:
        """Nobody computes `blocks` that nothing else holds: those that are only expected leave, and are returned."""
        expected, leased, coming = self._expected, self._leased, self._coming
        dropped = [block for block in blocks if block in expected and block not in leased and block not in coming]
        self._drop(dropped)
        self._use([block for block in blocks if block in self._last_use])
        return dropped

    def _drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            del self._last_use[block]
            self._expected.pop(block, None)

    def _come_no_more(self, blocks: list[int]) -> None:
        if self._coming:
            for block in blocks:
                self._coming.pop(block, None)

    def _settle(self, blocks: list[int]) -> None:
        if self._expected:
            for block in blocks:
                self._expected.pop(block, None)

    def _set_due(self, blocks: list[int]) -> None:
        """Give a date to what is expected and no longer leased."""
        expected, leased, coming = self._expected, self._leased, self._coming
        pending = [block for block in blocks if block in expected and block not in leased and block not in coming]
        due = self._reports + GRACE_REPORTS
        self._expected.update(dict.fromkeys(pending, due))
        if self._due and self._due[-1][0] == due:
            self._due[-1][1].update(pending)
        elif pending:
            self._due.append((due, set(pending)))

    def _unlease(self, blocks: list[int]) -> None:
        """Whoever leases a block leases all before it, so the blocks that only this lease used are the last ones."""
        leased, since_s = self._leased, self._leased_since_s
        counts = list(map(leased.__getitem__, blocks))
        shared = bisect_left(counts, -1, key=neg)
        for block in blocks[shared:]:
            del leased[block], since_s[block]
        leased.update(zip(blocks, [count - 1 for count in counts[:shared]], strict=False))


def _depth(blocks: list[int], most: int, holds: Callable[[int], bool]) -> int:
    """How many leading `blocks` hold, of the first `most`: by binary search, for none holds without its parent."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(blocks[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low

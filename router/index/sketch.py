"""The sketch: for each block hash, which workers hold the block.

One flat map `block hash -> bitmask of worker slots` answers "how deep does each worker match this prompt". A chained
hash names its whole prefix, so no tree is needed, and presence is monotone in depth: who holds block d holds all
before it. So `match` halves the interval in which workers drop out until it is one block, for all workers at once, and
the cost is O(log blocks) for each distinct answer: 7 look-ups for a prefix of a prompt of 4k tokens, 12 for one of
128k. Where a worker's record has a hole, the answer is a depth that the worker holds or less.

Beside the map stands a mirror for each worker, which bounds what is kept and says what leaves next (see `mirror`).
The map and the mirrors agree exactly after every call. The truth comes in three grades, each optional:

1. receipts (`receipt`): how many tokens of a prompt the worker really had cached;
2. deltas (`apply_delta`): what a worker evicted and added, numbered without gaps;
3. digests (`apply_digest`): all that a worker holds.

With the last two a worker also tells what it is going to compute for others (`apply_coming`).

Memory is bounded by the capacities of the workers and the prompts of running requests. One thread, the event loop's,
owns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, lru_cache

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.clock import Clock, MonotonicClock
from radixfleet.types import HashArray
from router.index.lease import BlockLease
from router.index.mirror import Mirror
from router.index.users import DepthArray, UsedFor, Users

NO_BLOCKS: HashArray = np.empty(0, dtype=np.uint64)


class Sketch:
    """Which routing blocks each worker of the fleet holds, as far as the router knows.

    A worker has a slot, a small number that `attach` gives and `detach` takes back. Methods that take a slot raise
    KeyError for one that is not attached.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        """`clock`: tells when a request was booked; the machine's own where none is given."""
        self._clock: Clock = clock or MonotonicClock()
        self._masks: dict[int, int] = {}
        self._mirrors: list[Mirror | None] = []
        self._open_leases = 0

    @property
    def num_blocks(self) -> int:
        """Distinct blocks in the sketch."""
        return len(self._masks)

    @property
    def open_leases(self) -> int:
        """Leases that have not ended."""
        return self._open_leases

    def blocks(self, slot: int) -> int:
        """Blocks that the worker is thought to hold."""
        return len(self._mirror(slot))

    def capacity_blocks(self, slot: int) -> int:
        """Blocks that the worker is thought to be able to hold: as reported, or less when receipts taught so."""
        return self._mirror(slot).modelled_blocks

    def approximate(self, slot: int) -> bool:
        """No digest came, or a delta is missing since: the sketch has only its own record of the worker."""
        return self._mirror(slot).sequence is None

    def attach(self) -> int:
        """A slot for a new worker: the lowest free one, so that masks stay short.

        It holds nothing, and until `set_capacity` it keeps nothing but leased blocks.
        """
        slot = next((slot for slot, mirror in enumerate(self._mirrors) if mirror is None), len(self._mirrors))
        self._mirrors[slot : slot + 1] = [Mirror(capacity_blocks=0)]
        return slot

    def detach(self, slot: int) -> None:
        """Forget the worker and free its slot. Its open leases must still be ended, and change nothing any more."""
        self.wipe(slot)
        self._mirrors[slot] = None

    def wipe(self, slot: int) -> None:
        """The worker holds nothing any more, leased blocks included."""
        mirror = self._mirror(slot)
        self._clear(slot, mirror.blocks())
        self._mirrors[slot] = Mirror(mirror.capacity_blocks, mirror.incarnation)

    def set_incarnation(self, slot: int, incarnation: int) -> None:
        """The worker's engine says which start of it this is; a new one holds nothing of what the old one held."""
        if self._mirror(slot).incarnation not in (None, incarnation):
            self.wipe(slot)
        self._mirror(slot).incarnation = incarnation

    def set_capacity(self, slot: int, blocks: int) -> None:
        """How many blocks the worker can hold, as it reported."""
        mirror = self._mirror(slot)
        mirror.set_capacity(blocks)
        self._trim(slot, mirror)

    def match(self, hashes: HashArray) -> DepthArray:
        """How many leading blocks of a prompt each worker holds, by slot (0 for a free slot).

        `hashes`: uint64 [blocks], chained. Changes nothing.
        """
        depths = np.zeros(len(self._mirrors), dtype=np.intp)
        mask_of, hash_at = self._masks.get, hashes.item
        # (workers, d, h): they hold block d and none from block h on, counted from 1.
        intervals = [(mask_of(hash_at(0), 0), 1, len(hashes) + 1)] if len(hashes) else []
        while intervals:
            workers, depth, below = intervals.pop()
            while workers and below - depth > 1:
                middle = (depth + below) // 2
                reach = workers & mask_of(hash_at(middle - 1), 0)
                if reach == workers:
                    depth = middle
                    continue
                if reach:
                    intervals.append((reach, middle, below))
                workers, below = workers ^ reach, middle
            if workers:
                depths[_slots(workers)] = depth
        return depths

    def holders(self, block_hash: int) -> tuple[int, ...]:
        """Slots of the workers that are thought to hold the block."""
        return tuple(_slots(self._masks.get(block_hash, 0)).tolist())

    def users(self, hashes: HashArray, depths: DepthArray) -> Mapping[int, int]:
        """How many open leases there are on the deepest block that each worker holds of a prompt, by slot, if any.

        `depths` is what `match` returned for `hashes`. Whoever uses a block uses all before it, so these are the
        requests that share all of the prompt that can be shared there. Read it in the same turn: it looks when asked.
        """
        return Users(self._mirrors, hashes, depths)

    def used_for_s(self, hashes: HashArray, depths: DepthArray) -> Mapping[int, float]:
        """For how long, in seconds, there has always been one of those `users`, by slot, where there are any.

        Of what is used by requests that came in the same moment it is 0.
        """
        return UsedFor(self._mirrors, hashes, depths, self._clock)

    def book(self, slot: int, hashes: HashArray, prompt_tokens: int, known: int | None = None) -> BlockLease:
        """A request with these prompt blocks goes to the worker, which will hold them: count them as there from now on.

        `hashes`: uint64 [blocks], chained. `known`: what `match` just said of the worker; looked up where it is None.
        """
        mirror = self._mirror(slot)
        blocks: list[int] = hashes.tolist()
        if known is None:
            known = mirror.depth(blocks)
        lasting = mirror.lasting(blocks, known)
        settled_use = mirror.settled_use(blocks[known - 1]) if known else None
        joined = mirror.lease(blocks, known, self._clock.now())
        self._mark(slot, joined)
        self._trim(slot, mirror)
        self._open_leases += 1
        return BlockLease(slot, blocks, prompt_tokens, known, lasting, len(joined), settled_use, mirror)

    def receipt(self, lease: BlockLease, cached_tokens: int) -> None:
        """The worker began the request and found `cached_tokens` of its prompt in its cache.

        With word from the worker by deltas this teaches nothing. Nor does a prediction that counted on blocks which
        another request was still computing.
        """
        mirror = lease.mirror
        _begin(lease)
        if not self._is_current(lease) or mirror.sequence is not None or lease.settled_use is None:
            return
        predicted = lease.predicted_tokens // BLOCK_TOKENS
        missing = predicted - cached_tokens // BLOCK_TOKENS
        if missing > 0:
            self._clear(lease.slot, mirror.correct(missing, lease.settled_use))
        elif predicted:
            mirror.agree()

    def end(self, lease: BlockLease, output_hashes: HashArray | None = None) -> None:
        """The request ended after the worker had begun it. Ending a lease twice does nothing.

        `output_hashes`: uint64 [blocks], the chain's continuation over the prompt's tail and the generated tokens: the
        next turn of the chat finds them.
        """
        if not self._close(lease):
            return
        output: list[int] = [] if output_hashes is None else output_hashes.tolist()
        joined = lease.mirror.release(lease.blocks, output)
        if joined:
            self._mark(lease.slot, joined)
        self._trim(lease.slot, lease.mirror)

    def abandon(self, lease: BlockLease) -> None:
        """The request ended, and the worker never began it: blocks that only it would have brought are not there."""
        if self._close(lease):
            self._clear(lease.slot, lease.mirror.abandon(lease.blocks))
            self._trim(lease.slot, lease.mirror)

    def apply_digest(self, slot: int, incarnation: int, sequence: int, hashes: HashArray) -> None:
        """All blocks that the worker holds, as of its report `sequence`. Leased blocks stay: they are in flight.

        `hashes`: uint64 [blocks], in any order. Call `set_capacity` first.
        """
        self.set_incarnation(slot, incarnation)
        self._apply(slot, self._mirror(slot).replace(sequence, hashes.tolist()))

    def apply_delta(self, slot: int, incarnation: int, sequence: int, evicted: HashArray, added: HashArray) -> bool:
        """What the worker evicted and then added. Call it for every report without a digest, also when both are empty.

        A report with a change has the number after the last one's; a report without a change repeats that. Returns
        False when the number or the incarnation does not fit: the sketch is then approximate and needs a digest.
        """
        is_change = len(evicted) > 0 or len(added) > 0
        if not self.repeats(slot, incarnation, sequence - is_change):
            return False
        mirror = self._mirror(slot)
        self._apply(slot, mirror.change(sequence, evicted.tolist(), added.tolist()))
        self._clear(slot, mirror.expire())
        return True

    def repeats(self, slot: int, incarnation: int, sequence: int) -> bool:
        """Whether an update between two reports has the last one's number, as it must. False: as of `apply_delta`."""
        self.set_incarnation(slot, incarnation)
        if self._mirror(slot).sequence == sequence:
            return True
        self.lose_truth(slot)
        return False

    def apply_coming(self, slot: int, coming: HashArray, gone: HashArray = NO_BLOCKS) -> None:
        """What the worker is going to compute for prompts that it has accepted, and what of that comes no more.

        A block that it adds (`apply_delta`) is not coming any more, and after a digest nothing is: tell all anew. Does
        nothing while the worker's reports are not to be relied on.
        """
        mirror = self._mirror(slot)
        if mirror.sequence is None or not len(coming) + len(gone):
            return
        self._clear(slot, mirror.come_no_more(gone.tolist()))
        self._mark(slot, mirror.come(coming.tolist()))
        self._trim(slot, mirror)

    def lose_truth(self, slot: int) -> None:
        """The stream of reports broke off; until the next digest the sketch has only its own record."""
        mirror = self._mirror(slot)
        mirror.lose_truth()
        self._trim(slot, mirror)

    def check(self) -> None:
        """Raise AssertionError when map and mirrors do not agree. O(blocks)."""
        masks: dict[int, int] = {}
        for slot, mirror in self._attached():
            mirror.check()
            for block in mirror.blocks():
                masks[block] = masks.get(block, 0) | 1 << slot
        if masks != self._masks:
            raise AssertionError("map and mirrors differ")

    def _mirror(self, slot: int) -> Mirror:
        mirror = self._mirrors[slot] if 0 <= slot < len(self._mirrors) else None
        if mirror is None:
            raise KeyError(f"no worker is attached at slot {slot}")
        return mirror

    def _attached(self) -> Iterator[tuple[int, Mirror]]:
        return ((slot, mirror) for slot, mirror in enumerate(self._mirrors) if mirror is not None)

    def _is_current(self, lease: BlockLease) -> bool:
        return lease.slot < len(self._mirrors) and self._mirrors[lease.slot] is lease.mirror

    def _close(self, lease: BlockLease) -> bool:
        """Close the lease; True when it was open and its mirror still counts."""
        if not lease.is_open:
            return False
        lease.is_open = False
        _begin(lease)
        self._open_leases -= 1
        return self._is_current(lease)

    def _apply(self, slot: int, change: tuple[list[int], list[int]]) -> None:
        left, joined = change
        self._clear(slot, left)
        self._mark(slot, joined)
        self._trim(slot, self._mirror(slot))

    def _trim(self, slot: int, mirror: Mirror) -> None:
        """Make room down to the bound."""
        left = mirror.trim()
        if left:
            self._clear(slot, left)

    def _mark(self, slot: int, blocks: Collection[int]) -> None:
        """Set the worker's bit. Blocks of one prefix mostly have the same holders: neighbours share one mask object."""
        masks, bit = self._masks, _bit(slot)
        if masks.keys().isdisjoint(blocks):  # what is new to the worker is mostly new to all
            for block in blocks:
                masks[block] = bit
            return
        seen, joined = 0, bit
        for block in blocks:
            mask = masks.get(block, 0)
            if mask is not seen:
                seen, joined = mask, mask | bit
            masks[block] = joined

    def _clear(self, slot: int, blocks: Iterable[int]) -> None:
        """Clear the worker's bit, which is set, and forget blocks that nobody holds."""
        masks, bit = self._masks, _bit(slot)
        seen, rest = bit, 0
        for block in blocks:
            mask = masks[block]
            if mask is not seen:
                seen, rest = mask, mask ^ bit
            if rest:
                masks[block] = rest
            else:
                del masks[block]


def _begin(lease: BlockLease) -> None:
    if not lease.is_begun:
        lease.is_begun = True
        lease.mirror.begun(lease.known_blocks, lease.joined_blocks)


@cache
def _bit(slot: int) -> int:
    """One int object a slot, shared by all blocks that only this worker holds."""
    return 1 << slot


@lru_cache(maxsize=4096)
def _slots(mask: int) -> DepthArray:
    """The numbers of the bits that are set. Hot prefixes have few distinct masks, so most calls are look-ups."""
    data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    slots = np.unpackbits(data, bitorder="little").nonzero()[0]
    slots.flags.writeable = False
    return slots

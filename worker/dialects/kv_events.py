"""What a worker has cached, and its load, as the stream of KV events that gateways follow (`SubscribeKvEvents`).

    engine --Report--> BlockBook --Change--> KvEventFeed --KvEventBatch--> Subscription, Subscription, ...

Batches have consecutive numbers. A subscriber that begins at 0 gets a snapshot: chunks with the numbers that end at the
present one, so that live batches go on behind it. One that goes on where it was gets what it missed, as long as that is
remembered; else it is refused, and begins at 0. A snapshot of several chunks ends what is remembered, for they have the
same numbers. Numbers begin at the milliseconds since 1970, so that no number of an earlier process is ever mistaken for
one of this.

A restarted engine is one event, "cleared", in the same sequence. Every batch carries the load; a batch that has nothing
else repeats the number before it. The engine tells tokens only while somebody follows, and for a while after.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from smg_grpc_proto.generated import common_pb2

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.types import WorkerStatus
from worker.core.messages import Report
from worker.dialects.block_book import Block, BlockBook, Change
from worker.dialects.load import engine_load
from worker.engine.handle import EngineHandle, Notice, StateChange

SNAPSHOT_BLOCKS = 1024
"""In a chunk: with 64 tokens each, about 200 kB, and 10 ms to make."""
REMEMBERED_BATCHES = 512
HEARTBEAT_S = 1.0
LINGER_S = 60.0
"""How long the engine goes on telling tokens when the last subscriber has left."""
MAX_UNREAD = 64
"""Batches that a subscriber may be behind by, beside as many as it begins with."""


class OutOfRange(Exception):
    """The number that a subscriber would go on from is not remembered."""


class Subscription(AsyncIterator[Any]):
    """One subscriber's place in the stream. Holds a bounded number of batches that were not read yet."""

    def __init__(self) -> None:
        self._beginning: Iterator[Any] = iter(())
        self._unread: deque[Any] = deque()
        self._most_unread = MAX_UNREAD
        self._arrived = asyncio.Event()
        self._ended = False
        self._samples = 0
        self.sequence: int | None = None
        """Of the last batch put; None before the first."""
        self.told_s = 0.0
        """When it last heard of the load."""

    @property
    def is_behind(self) -> bool:
        """Too many batches wait: it is to `begin` anew."""
        return len(self._unread) >= self._most_unread

    def begin(self, batches: Iterator[Any], *, count: int, sequence: int, now_s: float) -> None:
        """A snapshot, or what it missed, up to a number, in place of what is unread.

        Each is made when it is read: nobody else waits until all of a large snapshot is made.
        """
        self._beginning, self._most_unread = batches, MAX_UNREAD + count
        self._unread.clear()
        self.sequence, self.told_s = sequence, now_s
        self._arrived.set()

    def put(self, batch: Any, load: Any, now_s: float) -> None:
        """Add a batch, with the load. A load record that nobody has read yet gives way to a newer one."""
        own = _with_load(batch, load)
        if own.load.load_only and self._unread and self._unread[-1].load.load_only:
            self._unread.pop()
        self._unread.append(own)
        self.sequence, self.told_s = own.sequence_number, now_s
        self._arrived.set()

    def end(self) -> None:
        """No more batches come."""
        self._ended = True
        self._arrived.set()

    async def __anext__(self) -> Any:
        """Wait for the next batch."""
        while (batch := self._next()) is None:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        self._samples += 1
        batch.load.sample = self._samples
        return batch

    def _next(self) -> Any | None:
        batch = next(self._beginning, None)
        return self._unread.popleft() if batch is None and self._unread else batch


class KvEventFeed:
    """Follows the engine within the block that it manages. On the front's event loop."""

    def __init__(self, engine: EngineHandle, *, linger_s: float = LINGER_S) -> None:
        self._engine = engine
        self._linger_s = linger_s
        self._book = BlockBook()
        self._incarnation = engine.incarnation
        self._sequence = int(time.time() * 1000)
        self._remembered: deque[Any] = deque(maxlen=REMEMBERED_BATCHES)
        self._subscriptions: set[Subscription] = set()
        self._waiting: set[Subscription] = set()
        """Those among them that get a snapshot as soon as the book is complete."""
        self._is_followed = False
        self._leaving: asyncio.TimerHandle | None = None
        self._told_load = common_pb2.EngineLoad()

    async def __aenter__(self) -> Self:
        self._unsubscribe = self._engine.subscribe(self._on_notice)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._unsubscribe()
        if self._leaving is not None:
            self._leaving.cancel()
        for subscription in self._subscriptions:
            subscription.end()

    @contextmanager
    def subscribe(self, start: int) -> Iterator[Subscription]:
        """The batches from number `start` on; 0: a snapshot, then what follows. Raises OutOfRange."""
        subscription = Subscription()
        if start:
            self._resume(subscription, start)
        else:
            self._waiting.add(subscription)
        self._subscriptions.add(subscription)
        self._follow()
        self._serve_waiting()
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            self._waiting.discard(subscription)
            if not self._subscriptions:
                self._leaving = asyncio.get_running_loop().call_later(self._linger_s, self._leave)

    def _follow(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if not self._is_followed and self._engine.status is WorkerStatus.SERVING:
            self._is_followed = True
            self._engine.follow_blocks(on=True)

    def _leave(self) -> None:
        """Nobody has followed for a while."""
        if not self._subscriptions and self._is_followed:
            self._is_followed = False
            self._engine.follow_blocks(on=False)
            self._book.clear()
            self._remembered.clear()
            self._sequence += 1  # what changes from now on has no number: nobody may go on from an earlier one

    def _resume(self, subscription: Subscription, start: int) -> None:
        oldest = self._remembered[0].sequence_number if self._remembered else self._sequence + 1
        if not self._book.is_complete or not oldest <= start <= self._sequence + 1:
            raise OutOfRange(f"batch {start} is not remembered; begin at 0, which gives a snapshot")
        load, missed = self._load(), [batch for batch in self._remembered if batch.sequence_number >= start]
        subscription.begin(
            (_with_load(batch, load) for batch in missed),
            count=len(missed),
            sequence=self._sequence,
            now_s=time.monotonic(),
        )

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, StateChange):
            self._on_state_change(notice)
        elif self._subscriptions or self._is_followed:
            self._on_report(notice)

    def _on_state_change(self, change: StateChange) -> None:
        if change.incarnation != self._incarnation:
            self._incarnation = change.incarnation
            self._is_followed = False
            if self._book.is_complete:
                self._book.clear()
                self._publish([common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())])
        if change.status is WorkerStatus.SERVING and self._subscriptions:
            self._follow()

    def _on_report(self, report: Report) -> None:
        was_complete = self._book.is_complete
        change = self._book.apply(report)
        # What a book begins with is in everybody's snapshot, unless they follow from before a restart.
        if change is not None and (change.removed or change.stored) and (was_complete or self._remembered):
            self._publish(_events(change))
        self._serve_waiting()
        self._tell_load()

    def _publish(self, events: list[Any]) -> None:
        """One batch for all who are not waiting for a snapshot, which has it."""
        self._sequence += 1
        batch = common_pb2.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), events=events)
        self._remembered.append(batch)
        load, now_s = self._load(), time.monotonic()
        for subscription in self._subscriptions - self._waiting:
            if subscription.is_behind:
                self._waiting.add(subscription)
            else:
                subscription.put(batch, load, now_s)

    def _serve_waiting(self) -> None:
        if not self._waiting or not self._book.is_complete:
            return
        blocks, load, last = self._book.blocks(), self._load(), self._sequence
        count = max(1, -(-len(blocks) // SNAPSHOT_BLOCKS))
        for subscription in self._waiting:
            snapshot = _snapshot(blocks, load, count=count, last=last)
            subscription.begin(snapshot, count=count, sequence=last, now_s=time.monotonic())
        self._waiting.clear()
        if count > 1:
            self._remembered.clear()  # who breaks off within the chunks must not go on with batches of their numbers

    def _tell_load(self) -> None:
        """A record without events, where the load is another one, or nothing was said for a while."""
        load, now_s = self._load(), time.monotonic()
        has_changed = load != self._told_load
        self._told_load = load
        record = common_pb2.EngineLoad(load_only=True)
        record.MergeFrom(load)
        for subscription in self._subscriptions - self._waiting:
            if subscription.sequence is not None and (has_changed or now_s - subscription.told_s >= HEARTBEAT_S):
                batch = common_pb2.KvEventBatch(sequence_number=subscription.sequence, timestamp=time.time())
                subscription.put(batch, record, now_s)

    def _load(self) -> Any:
        return engine_load(self._engine.last_report, self._engine.last_ready)


def _with_load(batch: Any, load: Any) -> Any:
    """A copy."""
    own = common_pb2.KvEventBatch()
    own.CopyFrom(batch)
    own.load.CopyFrom(load)
    return own


def _snapshot(blocks: Sequence[Block], load: Any, *, count: int, last: int) -> Iterator[Any]:
    """All blocks, in chunks whose numbers end at `last`; the first begins with "cleared"."""
    for index in range(count):
        events = _stored(blocks[index * SNAPSHOT_BLOCKS : (index + 1) * SNAPSHOT_BLOCKS])
        if not index:
            events.insert(0, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))
        yield common_pb2.KvEventBatch(
            sequence_number=last - count + 1 + index,
            timestamp=time.time(),
            events=events,
            snapshot=common_pb2.KvSnapshotChunk(index=index, count=count, blocks=len(blocks)),
            load=load,
        )


def _events(change: Change) -> list[Any]:
    events = []
    if change.removed:
        removed = common_pb2.KvBlocksRemoved(block_hashes=map(signed, change.removed))
        events.append(common_pb2.KvCacheEvent(removed=removed))
    return events + _stored(change.stored)


def _stored(blocks: Iterable[Block]) -> list[Any]:
    """One event for each run of blocks that follow one another in a prefix."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and block.parent == runs[-1][-1].hash:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [common_pb2.KvCacheEvent(stored=_run(run)) for run in runs]


def _run(blocks: list[Block]) -> Any:
    first = blocks[0]
    return common_pb2.KvBlocksStored(
        blocks=[
            common_pb2.KvBlock(
                block_hash=signed(block.hash), token_ids=block.token_ids.tolist(), block_size=BLOCK_TOKENS
            )
            for block in blocks
        ],
        parent_block_hash=None if first.parent is None else signed(first.parent),
        tier=common_pb2.KV_CACHE_TIER_DEVICE,
        cache_salt=first.cache_salt or None,
    )


def signed(block: int) -> int:
    """An unsigned 64-bit hash as the signed number with the same bits."""
    return block - (1 << 64) if block >= 1 << 63 else block

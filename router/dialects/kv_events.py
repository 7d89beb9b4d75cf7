"""Follows an engine's KV events into `ForeignBlocks`, and knows when what it has is the whole truth.

    subscribe from 0 --+-- a snapshot, or "cleared", or the publisher's first batch, number 0: complete from here
                       +-- batch 1: complete but for one batch, which servers publish while they warm their engine up;
                       |   what goes on from its blocks has a parent that is not known here, and is no fault; but
                       |   where more than a few do, too little is known, and batch 1 is no beginning any more
                       +-- anything else: the engine lived before we listened, so what it told then is not known here
    a gap, OUT_OF_RANGE, another unknown parent  --> cleared, not complete, subscribe from 0
    a batch of a further data-parallel rank      --> the same, for good
    a load record repeats the last number, and is no batch

While it is not complete the router goes by its own record of the engine, as if there were no events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import grpc.aio
import structlog
from smg_grpc_proto.generated import common_pb2

from radixfleet.blocks import namespace, seed_hash
from radixfleet.types import BlockHash
from router.dialects.foreign_blocks import ForeignBlocks

_PAUSE_S = 1.0
_MOST_FORGIVEN = 32
"""Prompts that go on from a missed first batch: a warm-up shares its beginning with few others, or with all."""
_NO_EVENTS = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION})
_DEVICE_TIERS = (common_pb2.KV_CACHE_TIER_UNSPECIFIED, common_pb2.KV_CACHE_TIER_DEVICE)
_LOCAL = (common_pb2.KV_CACHE_LOCALITY_UNSPECIFIED, common_pb2.KV_CACHE_LOCALITY_LOCAL)

_log = structlog.get_logger("radixfleet.router.dialects")


class _Resync(Exception):
    """What we have is not to be trusted any more."""


class KvEvents:
    """Of one engine. `changed` is called after each batch."""

    def __init__(self, worker: str, model: str, changed: Callable[[], None]) -> None:
        self._worker = worker
        self._model = model
        self._changed = changed
        self.blocks = ForeignBlocks()
        self.generation = 0
        """Counts how often it became complete: each time calls for a digest."""
        self._is_whole = False
        """Nothing that was told is missing here."""
        self.load: Any = None
        """The last EngineLoad that came."""
        self.was_cut = False
        """The stream broke, as it does when the engine dies."""
        self._cursor: int | None = None
        """Number of the last batch; None before the first."""
        self._ignored_groups: set[int] = set()
        self._has_prefixes = False
        """A group was heard of that is not ignored."""
        self._has_warned = False
        self._lacks_first = False
        """All is known but for the publisher's first batch."""
        self._num_forgiven = 0
        """Unknown parents that were taken for blocks of that batch."""

    @property
    def is_complete(self) -> bool:
        """What is known of the cache is the whole truth."""
        return self._is_whole and (self._has_prefixes or not self._ignored_groups)

    async def follow(self, stub: Any) -> None:
        """Until cancelled, or until it shows that the engine has no events, or those of several caches."""
        while True:
            request = common_pb2.SubscribeKvEventsRequest(
                start_sequence_number=0 if self._cursor is None else self._cursor + 1,
                load_records_before_first_batch=True,
            )
            call = stub.SubscribeKvEvents(request)
            try:
                while isinstance(batch := await call.read(), common_pb2.KvEventBatch):
                    if batch.dp_rank:
                        self._leave("it has several data-parallel ranks, each with a cache and numbers of its own")
                        return
                    self.take(batch)
            except _Resync as reason:
                self._distrust(str(reason))
            except grpc.aio.AioRpcError as error:
                if error.code() in _NO_EVENTS:
                    self._leave("it publishes no KV events")
                    return
                if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                    self._distrust("it has forgotten where we were")
                else:
                    self.was_cut = True
            finally:
                call.cancel()
            await asyncio.sleep(_PAUSE_S)

    def take(self, batch: Any) -> None:
        """One batch. Raises _Resync."""
        if batch.HasField("load"):
            self.load = batch.load
            if batch.load.load_only:
                self._changed()
                return
        if batch.HasField("snapshot"):
            self._begin(batch.snapshot)
        elif self._cursor is not None and batch.sequence_number != self._cursor + 1:
            raise _Resync(f"batches {self._cursor + 1} to {batch.sequence_number - 1} are missing")
        elif self._cursor is None and batch.sequence_number <= 1:
            self._begin_by(batch.sequence_number)
        self._cursor = batch.sequence_number
        for event in batch.events:
            self._apply(event)
        if batch.HasField("snapshot") and batch.snapshot.index + 1 == batch.snapshot.count:
            if batch.snapshot.unknown_before:
                self._distrust("its record of the cache is not whole", forget=False)
            else:
                self._complete()
        if self._cursor is not None and not self.is_complete and not batch.HasField("snapshot"):
            late = f"it lived before this router listened, which heard batch {batch.sequence_number} first"
            self._warn("its attention is of no kind that makes prefixes" if self._is_whole else late)
        self._changed()

    def _begin(self, snapshot: Any) -> None:
        if not snapshot.index:
            self.blocks.clear()
            self._lacks_first = False
            self._num_forgiven = 0
            self._is_whole = False

    def _begin_by(self, number: int) -> None:
        """All is known from here on: by batch 0, or by batch 1 unless that turned out to be too late."""
        if number == 1 and self._num_forgiven > _MOST_FORGIVEN:
            return
        self._lacks_first = number == 1
        self._num_forgiven = 0
        self._complete()

    def _complete(self) -> None:
        if not self._is_whole:
            self._is_whole = True
            self.generation += 1
            self._has_warned = False
            _log.info("follows the cache of the engine by its KV events", worker=self._worker, blocks=len(self.blocks))

    def _leave(self, why: str) -> None:
        """Nothing more is heard; who wants to know the load asks for it."""
        self.load = None
        self._distrust(why)

    def _distrust(self, why: str, *, forget: bool = True) -> None:
        self._is_whole = self._lacks_first = False
        if forget:
            self.blocks.clear()
            self._cursor = None
        self._warn(why)
        self._changed()

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(f"no truth from worker {self._worker}, approximate: {why}", worker=self._worker)

    def _apply(self, event: Any) -> None:
        kind = event.WhichOneof("data")
        if kind == "cleared":
            if not event.cleared.ownership:  # else of a tier behind the engine
                self.blocks.clear()
                self._begin_by(0)
        elif kind == "removed":
            if self._counts(event.removed):
                self.blocks.remove(event.removed.block_hashes)
        elif kind == "stored":
            stored = event.stored
            if not self._counts(stored) or not self._makes_prefixes(stored):
                return
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            lost = self.blocks.store(
                _seed(self._model, stored.cache_salt, stored.lora_name),
                parent,
                ((block.block_hash, block.token_ids) for block in stored.blocks),
            )
            if lost and self._is_whole:
                self._forgive()

    def _forgive(self) -> None:
        """A block's parent is not known here. Raises _Resync unless it may be of the batch that was missed."""
        if not self._lacks_first:
            raise _Resync("a block has a parent that was never told")
        if not self._num_forgiven:
            _log.info("some prompts go on from what the engine cached before this router listened", worker=self._worker)
        self._num_forgiven += 1
        if self._num_forgiven > _MOST_FORGIVEN:
            raise _Resync("many blocks go on from what was never told, more than from a warm-up")

    def _counts(self, event: Any) -> bool:
        """Whether it is about blocks on the engine's own device, of a kind that makes prefixes."""
        if event.HasField("tier") and event.tier not in _DEVICE_TIERS:
            return False
        if event.HasField("locality") and event.locality not in _LOCAL:
            return False
        return not (event.HasField("group_idx") and event.group_idx in self._ignored_groups)

    def _makes_prefixes(self, stored: Any) -> bool:
        """Models with several kinds of attention have groups of blocks for each; only the full kinds make prefixes.

        vLLM names them full_attention, sink_full_attention, and mla_attention (DeepSeek, others that compress). Where
        an engine has none of them, a sliding window alone, say, the router's own record tells more than its events.
        """
        kind = stored.kv_cache_spec_kind
        if kind and "full" not in kind and not kind.startswith("mla") and stored.HasField("group_idx"):
            self._ignored_groups.add(stored.group_idx)
            return False
        if not self._has_prefixes:
            self._has_prefixes = True
            self._has_warned = False
            self.generation += bool(self._ignored_groups)
        return True


@lru_cache(maxsize=1024)
def _seed(model: str, cache_salt: str, lora_name: str) -> BlockHash:
    return seed_hash(namespace(model, cache_salt, lora_name))

"""A gateway's copy of what a worker has cached, built from KV events as gateways build theirs: by tokens alone."""

from __future__ import annotations

from typing import Any

import grpc.aio
from smg_grpc_proto.generated import common_pb2


class KvFollower:
    """Reads a SubscribeKvEvents stream, and holds it to what the definitions promise."""

    def __init__(self, stub: Any, start: int = 0) -> None:
        self.call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=start))
        self.cursor = start - 1 if start else None
        """Number of the last batch that was no mere load record."""
        self.prefixes: dict[int, tuple[int, ...]] = {}
        """By the worker's own hash of the last block: all tokens of the prefix."""
        self.salts: dict[int, str] = {}
        self.loads: list[Any] = []
        self.snapshots = 0
        self.cleared = 0

    async def read(self) -> Any:
        """Take the next batch in."""
        batch = await self.call.read()
        assert batch is not grpc.aio.EOF, "the stream ended"
        assert batch.HasField("load")
        assert not self.loads or batch.load.sample > self.loads[-1].sample
        self.loads.append(batch.load)
        if batch.load.load_only:
            assert batch.sequence_number == self.cursor
            assert not batch.events
            return batch
        if batch.HasField("snapshot"):
            self.snapshots += not batch.snapshot.index
            assert batch.snapshot.index or batch.events[0].WhichOneof("data") == "cleared"
        else:
            assert self.cursor is None or batch.sequence_number == self.cursor + 1, "a gap"
        self.cursor = batch.sequence_number
        for event in batch.events:
            self._apply(event)
        return batch

    async def read_until(self, condition: Any) -> None:
        """Read batches until `condition(self)` holds."""
        while not condition(self):
            await self.read()

    def _apply(self, event: Any) -> None:
        kind = event.WhichOneof("data")
        if kind == "cleared":
            self.prefixes.clear()
            self.cleared += 1
        elif kind == "removed":
            for block in event.removed.block_hashes:
                del self.prefixes[block]
        else:
            stored = event.stored
            prefix = self.prefixes[stored.parent_block_hash] if stored.HasField("parent_block_hash") else ()
            for block in stored.blocks:
                assert len(block.token_ids) == block.block_size
                prefix += tuple(block.token_ids)
                self.prefixes[block.block_hash] = prefix
                self.salts[block.block_hash] = stored.cache_salt

    @property
    def cached(self) -> set[tuple[int, ...]]:
        """Every cached prefix of whole blocks."""
        return set(self.prefixes.values())

"""A watcher of a worker's state, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import numpy as np

from radixfleet.v1 import worker_pb2, worker_pb2_grpc

Update = worker_pb2.StateUpdate


class Reader:
    """Reads a state stream and applies it as a router does. Checks that no number is missing, nothing told twice."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = worker_pb2_grpc.WorkerStub(channel).WatchState(worker_pb2.WatchStateRequest(watcher="test"))
        self.blocks: set[int] = set()
        self.coming: set[int] = set()
        self.sequence = -1
        self.incarnation = 0
        self.digests = 0
        self.leases: list[tuple[str, str]] = []

    async def next(self) -> Update:
        update = await self.call.read()
        assert update is not grpc.aio.EOF
        for event in update.lease_events:
            phase = worker_pb2.LeaseEvent.Phase.Name(event.phase).removeprefix("PHASE_")
            self.leases.append((event.lease_id, phase))
        if update.WhichOneof("prefix") == "digest":
            self.digests += 1
            self.blocks = set(unpack(update.digest.block_hashes))
            self.coming = set()
        else:
            assert update.incarnation == self.incarnation, "a new incarnation begins with a digest"
            assert update.sequence == self.sequence + update.HasField("delta"), "no gap"
            self.blocks -= set(unpack(update.delta.evicted))
            self.blocks |= set(unpack(update.delta.added))
            self.coming -= set(unpack(update.delta.added))
        self._take_coming(set(unpack(update.coming)), set(unpack(update.gone)))
        self.sequence, self.incarnation = update.sequence, update.incarnation
        return update

    def _take_coming(self, coming: set[int], gone: set[int]) -> None:
        assert gone <= self.coming
        assert not coming & (self.coming | self.blocks)
        self.coming = (self.coming - gone) | coming

    async def until(self, condition: Callable[[Update], bool]) -> Update:
        async with asyncio.timeout(30):
            while True:
                update = await self.next()
                if condition(update):
                    return update


def unpack(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u8").tolist()

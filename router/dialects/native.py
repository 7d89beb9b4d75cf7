"""Our own workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc.aio

from radixfleet.v1 import worker_pb2, worker_pb2_grpc
from router.dialects.speaker import State

_MAX_TOKENIZER_BYTES = 256 * 1024**2


class NativeSpeaker:
    """Speaks `radixfleet.v1.Worker`."""

    dialect = "native"
    lacks: frozenset[str] = frozenset()

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float) -> None:
        """`timeout_s`: of a question about itself, and of each piece of the tokenizer."""
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._timeout_s = timeout_s

    async def info(self) -> worker_pb2.WorkerInfo:
        """See `Speaker`, here and below."""
        async with asyncio.timeout(self._timeout_s):
            return await self._stub.GetInfo(worker_pb2.GetInfoRequest())

    async def tokenizer(self) -> bytes:
        """The worker's tokenizer files, which come in chunks."""
        pieces: list[bytes] = []
        size = 0
        stream = self._stub.GetTokenizer(worker_pb2.GetTokenizerRequest())
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    chunk = await stream.read()
                if not isinstance(chunk, worker_pb2.TokenizerChunk):
                    return b"".join(pieces)
                size += len(chunk.data)
                if size > _MAX_TOKENIZER_BYTES:
                    raise ValueError(f"the worker's tokenizer is larger than {_MAX_TOKENIZER_BYTES} bytes")
                pieces.append(chunk.data)
        finally:
            stream.cancel()

    async def states(self) -> AsyncGenerator[State, None]:
        """What the worker reports on its stream of states."""
        stream = self._stub.WatchState(worker_pb2.WatchStateRequest(watcher="router"))
        try:
            while True:
                update = await stream.read()
                if not isinstance(update, worker_pb2.StateUpdate):
                    return
                yield State(update)
        finally:
            stream.cancel()

    async def drain(self, grace_s: float | None) -> worker_pb2.DrainResponse:
        """Have the worker drain; it does so by itself."""
        return await self._stub.Drain(worker_pb2.DrainRequest(grace_s=grace_s))

    async def resume(self) -> None:
        """Have the worker take up work again."""
        await self._stub.Resume(worker_pb2.ResumeRequest())

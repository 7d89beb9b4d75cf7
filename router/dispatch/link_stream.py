"""Requests to one worker over one stream, `Worker.Link`: the second `WorkerLink`, for workers that speak it.

A call of gRPC costs the router some 300 us of CPU, a frame about as much for all requests in it. Each request's inbox
holds at most the credit that the worker has; credit is given back as replies are read, so a slow reader holds back its
own request alone. The stream is opened by the first request, and again by the first one after it broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc.aio

from radixfleet.outgoing import MESSAGE_BYTES
from radixfleet.types import Incarnation
from radixfleet.v1 import worker_pb2_grpc
from router.dispatch.link import CallLink, LinkFailure, Reply, broken, deadline_passed
from router.dispatch.open_link import CREDIT, NotSpoken, OpenLink
from router.dispatch.request import PreparedRequest
from router.workers.state import WorkerState


class StreamLink:
    """See the module. On the event loop only."""

    def __init__(self, channel: grpc.aio.Channel, worker: WorkerState) -> None:
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._worker = worker
        self._calls = CallLink(channel, worker.name)
        self._silent_incarnation: Incarnation | None = None
        """The engine that did not know `Link`; another one may."""
        self._stream: OpenLink | None = None

    async def generate(self, request: PreparedRequest, timeout_s: float | None) -> AsyncGenerator[Reply, None]:
        """See `WorkerLink`."""
        num_bytes = request.message.ByteSize()
        stream = await self._stream_for(num_bytes, timeout_s)
        if stream is None:
            async with aclosing(self._calls.generate(request, timeout_s)) as replies:
                async for reply in replies:
                    yield reply
            return
        # Not left to a generator of the stream: each one on a token's way costs a microsecond.
        number, inbox = stream.start(request, num_bytes, timeout_s)
        read = 0
        try:
            while True:
                item, count = await inbox.get()
                if isinstance(item, LinkFailure):
                    raise item
                yield item
                if item.kind == "end":
                    return
                read += count
                if read >= CREDIT // 2:
                    stream.give_credit(number, read)
                    read = 0
        finally:
            stream.leave(number)

    def cut(self) -> None:
        """The worker hangs: give up all that runs there. When it wakes it finds that we have left."""
        self._calls.cut()
        if self._stream is not None:
            self._stream.end(broken(self._worker.name, "the worker says nothing"))

    async def close(self) -> None:
        """End the stream, and with it what still runs on it."""
        if self._stream is not None:
            await self._stream.close()

    @property
    def _is_silent(self) -> bool:
        return self._silent_incarnation is not None and self._silent_incarnation == self._worker.incarnation

    async def _stream_for(self, num_bytes: int, timeout_s: float | None) -> OpenLink | None:
        """The stream for a request of `num_bytes`; None: one as large goes by a call, to delay none behind it."""
        if num_bytes > MESSAGE_BYTES or self._is_silent:
            return None
        try:
            return await self._opened(timeout_s)
        except NotSpoken:
            self._silent_incarnation = self._worker.incarnation
            return None

    async def _opened(self, timeout_s: float | None) -> OpenLink:
        """The stream, once the worker has answered that it knows what it is. Raises NotSpoken, LinkFailure."""
        if self._stream is None or self._stream.is_over:
            self._stream = OpenLink(self._stub.Link(), self._worker.name)  # type: ignore[call-arg]  # written to by hand
        stream = self._stream
        if not stream.is_known:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(stream.known)
            except TimeoutError:
                raise deadline_passed("the worker has not answered yet") from None
        return stream

"""Requests to one worker over one stream, `Worker.Link`: the second `WorkerLink`, for workers that speak it.

    generate --> _outgoing --> writer --> frames, each with all that came while the last one was written
    generate <-- inbox of the request <-- reader <-- frames of the worker

Tokens that wait in an inbox, because their client or the router itself is behind, are joined into one reply.

A call of gRPC costs the router some 300 us of CPU, a frame about as much for all requests in it. Each request's inbox
holds at most the credit that the worker has; credit is given back as replies are read, so a slow reader holds back its
own request alone. The stream is opened by the first request, and again by the first one after it broke.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from radixfleet.accepted import is_accepted
from radixfleet.errors import DeadlineExceeded
from radixfleet.status import error_from_status
from radixfleet.tracing import headers
from radixfleet.types import Incarnation
from radixfleet.v1 import worker_pb2, worker_pb2_grpc
from router.dialects.speaker import Generator
from router.dispatch.link import CallLink, LinkFailure, Reply, WorkerLink, broken, failure_of, joined, reply_of
from router.dispatch.link_translated import TranslatedLink
from router.dispatch.request import PreparedRequest
from router.workers.state import WorkerState

CREDIT = 32
"""Messages of one request that may be on the way. Half of it is given back at a time."""
_LARGE_BYTES = 1024**2
"""Requests of this size hold up the others in their frame: they have calls of their own."""

_Stream: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.RouterFrame, worker_pb2.WorkerFrame]"


class _Inbox:
    """What came for one request and was not read yet."""

    __slots__ = ("_items", "_loop", "_reader")

    def __init__(self) -> None:
        self._items: deque[Reply | LinkFailure] = deque()
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        """Of the one who waits."""

    def put(self, item: Reply | LinkFailure) -> None:
        """Let the reader have it."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> tuple[Reply | LinkFailure, int]:
        """What comes next, and how many messages of the worker are in it."""
        items = self._items
        while not items:
            self._reader = self._loop.create_future()
            await self._reader
        first, count = items.popleft(), 1
        if isinstance(first, Reply):
            while items and isinstance(second := items[0], Reply) and joined(first, second):
                items.popleft()
                count += 1
        return first, count


class _NotSpoken(Exception):
    """The worker does not know `Worker.Link`."""


class StreamLink:
    """See the module. On the event loop only."""

    def __init__(self, channel: grpc.aio.Channel, worker: WorkerState) -> None:
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._worker = worker
        self._calls = CallLink(channel, worker.name)
        self._silent_incarnation: Incarnation | None = None
        """The engine that did not know `Link`; another one may."""
        self._stream: _Open | None = None

    async def generate(self, request: PreparedRequest, timeout_s: float | None) -> AsyncGenerator[Reply, None]:
        """See `WorkerLink`."""
        stream = await self._stream_for(request, timeout_s)
        if stream is None:
            async with aclosing(self._calls.generate(request, timeout_s)) as replies:
                async for reply in replies:
                    yield reply
            return
        # Not left to a generator of the stream: each one on a token's way costs a microsecond.
        number, inbox = stream.start(request, timeout_s)
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

    async def _stream_for(self, request: PreparedRequest, timeout_s: float | None) -> _Open | None:
        """None: the request goes by a call."""
        if request.message.ByteSize() >= _LARGE_BYTES or self._is_silent:
            return None
        try:
            return await self._opened(timeout_s)
        except _NotSpoken:
            self._silent_incarnation = self._worker.incarnation
            return None

    async def _opened(self, timeout_s: float | None) -> _Open:
        """The stream, once the worker has answered that it knows what it is. Raises _NotSpoken, LinkFailure."""
        if self._stream is None or self._stream.is_over:
            self._stream = _Open(self._stub.Link(), self._worker.name)  # type: ignore[call-arg]  # written to by hand
        stream = self._stream
        if not stream.is_known:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(stream.known)
            except TimeoutError:
                raise _late("the worker has not answered yet") from None
        return stream


class _Open:
    """One stream, from its call to its end."""

    def __init__(self, call: _Stream, worker: str) -> None:
        self._call = call
        self._worker = worker
        self._inboxes: dict[int, _Inbox] = {}
        self._late: dict[int, asyncio.TimerHandle] = {}
        """Deadlines, by the request's number."""
        self._numbers = 0
        self._outgoing = worker_pb2.RouterFrame()
        self._work = asyncio.Event()
        self.is_known = False
        self.is_over = False
        self.known = asyncio.create_task(self._greet())
        """Done when the worker has answered."""
        self._tasks = (
            self.known,
            asyncio.create_task(self._read(), name=f"read {worker}"),
            asyncio.create_task(self._write(), name=f"write {worker}"),
        )

    def start(self, request: PreparedRequest, timeout_s: float | None) -> tuple[int, _Inbox]:
        """Send the request; its number, and where the answer comes. To be followed by `leave`. Raises LinkFailure."""
        if self.is_over:
            raise broken(self._worker, "the link broke")
        self._numbers += 1
        number = self._numbers
        inbox = self._inboxes[number] = _Inbox()
        self._outgoing.starts.add(
            number=number, request=request.message, timeout_s=timeout_s, credit=CREDIT, **headers()
        )
        self._work.set()
        if timeout_s is not None:
            failure = _late("the deadline passed on the link")
            self._late[number] = asyncio.get_running_loop().call_later(max(0.0, timeout_s), inbox.put, failure)
        return number, inbox

    def give_credit(self, number: int, credit: int) -> None:
        """So many messages of the request were read."""
        self._outgoing.credits.add(number=number, credit=credit)
        self._work.set()

    def leave(self, number: int) -> None:
        """Nobody reads the request's answer any more; it ends at the worker, if it has not."""
        late = self._late.pop(number, None)
        if late is not None:
            late.cancel()
        if self._inboxes.pop(number, None) is not None and not self.is_over:
            self._outgoing.cancels.append(number)
            self._work.set()

    async def close(self) -> None:
        """End it."""
        self.end(broken(self._worker, "the link was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _greet(self) -> None:
        """Wait for the first word of the worker."""
        try:
            if not await is_accepted(self._call):
                await self._call.read()  # raises the status
                failure = broken(self._worker, "it takes no link")
                self.end(failure)
                raise failure
        except grpc.aio.AioRpcError as error:
            self.end(failure_of(error, self._worker))
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise _NotSpoken from None
            raise failure_of(error, self._worker) from error
        except asyncio.CancelledError:
            if not self.is_over:
                raise
            # Our own `end` cancelled the call, and nobody this task.
            raise broken(self._worker, "the link ended before the worker had answered") from None
        self.is_known = True

    async def _read(self) -> None:
        failure = broken(self._worker, "the worker ended the link")
        try:
            await asyncio.shield(self.known)
            while True:
                frame = await self._call.read()
                if not isinstance(frame, worker_pb2.WorkerFrame):
                    break
                for reply in frame.replies:
                    self._take(reply)
        except grpc.aio.AioRpcError as error:
            failure = failure_of(error, self._worker)
        except (LinkFailure, _NotSpoken):
            return
        finally:
            self.end(failure)

    def _take(self, message: worker_pb2.LinkReply) -> None:
        inbox = self._inboxes.get(message.number)
        if inbox is None:  # cancelled meanwhile
            return
        kind = message.WhichOneof("event")
        if kind == "response":
            item: Reply | LinkFailure = reply_of(message.response)
        elif kind == "status":
            item = _failure(message.status, self._worker)
        else:
            item = broken(self._worker, "the answer ended without its last message")
        if isinstance(item, LinkFailure) or item.kind == "end":
            del self._inboxes[message.number]
        inbox.put(item)

    async def _write(self) -> None:
        # What cannot be written is lost with the stream, of whose end the reader tells.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, LinkFailure, _NotSpoken):
            await asyncio.shield(self.known)
            while not self.is_over:
                await self._work.wait()
                self._work.clear()
                frame, self._outgoing = self._outgoing, worker_pb2.RouterFrame()
                await self._call.write(frame)

    def end(self, failure: LinkFailure) -> None:
        """Nothing more comes: tell all who wait."""
        if self.is_over:
            return
        self.is_over = True
        self._work.set()
        self._call.cancel()
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(LinkFailure(failure.kind, failure.error, str(failure)))


class Links:
    """The way to each worker: kept while the worker is known."""

    def __init__(
        self,
        channel: Callable[[WorkerState], grpc.aio.Channel],
        generator: Callable[[WorkerState], Generator | None],
        *,
        streams: bool,
    ) -> None:
        """`generator`: for workers that speak another dialect. `streams`: one stream a worker of ours, where it speaks
        that, else a call for each request.
        """
        self._channel = channel
        self._generator = generator
        self._streams = streams
        self._links: dict[WorkerState, StreamLink | CallLink] = {}

    def to(self, worker: WorkerState) -> WorkerLink:
        """The link to a worker that is in the registry."""
        generator = self._generator(worker)
        if generator is not None:
            return TranslatedLink(generator, worker.name)
        link = self._links.get(worker)
        if link is None:
            self._links = {known: link for known, link in self._links.items() if not known.removed}
            channel = self._channel(worker)
            link = StreamLink(channel, worker) if self._streams else CallLink(channel, worker.name)
            self._links[worker] = link
            worker.on_silence = link.cut
        return link

    async def close(self) -> None:
        """End all streams."""
        await asyncio.gather(*(link.close() for link in self._links.values() if isinstance(link, StreamLink)))


def _failure(status: bytes, worker: str) -> LinkFailure:
    try:
        message: Any = status_pb2.Status.FromString(status)
    except DecodeError:
        return broken(worker, "a status that is none")
    error = error_from_status(message)
    if isinstance(error, DeadlineExceeded):
        return _late(str(error))
    return LinkFailure("answer", error, f"{error.code}: {error}")


def _late(detail: str) -> LinkFailure:
    return LinkFailure("deadline", DeadlineExceeded("the deadline passed before the answer was there"), detail)

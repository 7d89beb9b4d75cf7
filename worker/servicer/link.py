"""The worker's end of `Worker.Link`: the requests of a router's clients, all on one stream.

    frame of the router --> _take: a task for each new request, which starts it and waits for its end
    engine's message --> Answer --listener--> _ready --> frames, each with all that there is credit for

The one writer takes messages from the answers when the frame before is on its way, so what comes meanwhile is joined
where it waits (see `generation`). It takes one message of each request in turn. Without credit nothing is taken, so a
slow reader costs memory bounded by its own answer, and holds up nobody else; nor does an answer that raises.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import grpc.aio
import structlog

from radixfleet.clock import Clock
from radixfleet.errors import InternalError, RadixfleetError
from radixfleet.status import status_from_error
from radixfleet.tracing import carried as carrying
from radixfleet.v1 import inference_pb2, worker_pb2

FRAME_BYTES = 1024**2
"""Most bytes in a frame, unless it is a single message that is larger."""

_HEADER_BYTES = 6
"""Most bytes that a frame adds to a message: the field's number, and a length below 32 GiB."""

TimeRemaining: TypeAlias = Callable[[], float | None]
"""Seconds until the client's deadline; None: it has none."""


class Answer(Protocol):
    """The messages of one request, as they come to be; see `Generation`."""

    @property
    def is_over(self) -> bool:
        """Whether every message was taken, and none comes any more."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why the request failed, if it did. A RadixfleetError is told to the client."""
        ...

    def listen(self, listener: Callable[[], None]) -> None:
        """Have it called when there is something to take, or it is over; at once, if there is."""
        ...

    @property
    def has_message(self) -> bool:
        """Whether `take` has a message to give."""
        ...

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """Move the next message into an empty one. There must be one."""
        ...


Running: TypeAlias = Callable[[inference_pb2.GenerateRequest, TimeRemaining], AbstractAsyncContextManager[Answer]]
"""A request that was started; leaving the block ends it. Raises RadixfleetError."""

Write: TypeAlias = Callable[[worker_pb2.WorkerFrame], Awaitable[None]]

_log = structlog.get_logger(__name__)


class Links:
    """All links of a worker."""

    def __init__(self, running: Running, clock: Clock) -> None:
        self._running = running
        self._clock = clock
        self._open: set[_Link] = set()

    async def serve(self, frames: AsyncIterator[worker_pb2.RouterFrame], write: Write) -> None:
        """One link, until the router ends it, or `close`. Its requests end with it."""
        link = _Link(self._running, self._clock)
        self._open.add(link)
        try:
            await link.serve(frames, write)
        finally:
            self._open.discard(link)

    async def close(self) -> None:
        """End all links."""
        for link in self._open:
            link.end()


@dataclass(slots=True)
class _Carried:
    """One request. It is `_ready` when it may have something to send."""

    number: int
    credit: int
    """Messages that may be sent."""
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    """All messages are in frames."""
    is_whole: bool = False
    """The last message is."""
    answer: Answer | None = None
    task: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None
    fault: Exception | None = None
    """What its answer raised when a message was taken."""

    def next_in(self, frame: worker_pb2.WorkerFrame) -> worker_pb2.LinkReply | None:
        """Put the next message into `frame`, if there is one, and credit for it."""
        answer = self.answer
        if answer is None:  # it was not started yet, or says nothing more
            return None
        if not self.credit or not answer.has_message:
            if answer.is_over:
                self.sent.set()
            return None
        self.credit -= 1
        reply = frame.replies.add(number=self.number)
        try:
            answer.take(reply.response)
        except Exception as error:  # noqa: BLE001  told to the client; the link's other requests go on
            del frame.replies[-1]
            self.fault, self.answer = error, None
            self.sent.set()
            return None
        self.is_whole = reply.response.finished.HasField("usage")
        return reply

    def cancel(self) -> None:
        """It is to end, and says nothing more."""
        self.answer = None
        if self.task is not None:
            self.task.cancel()


class _Link:
    """One stream."""

    def __init__(self, running: Running, clock: Clock) -> None:
        self._running = running
        self._clock = clock
        self._carried: dict[int, _Carried] = {}
        self._ready: OrderedDict[int, _Carried] = OrderedDict()
        """Requests with a message to send, the next one first."""
        self._failures: deque[worker_pb2.LinkReply] = deque()
        """Statuses of requests that have failed, to be sent as their last replies."""
        self._news = asyncio.Event()
        self._ended = False

    async def serve(self, frames: AsyncIterator[worker_pb2.RouterFrame], write: Write) -> None:
        """See `Links.serve`."""
        reader = asyncio.create_task(self._read(frames), name="link")
        try:
            while not self._ended:
                await self._news.wait()
                self._news.clear()
                for frame in self._frames():
                    await write(frame)
        finally:
            reader.cancel()
            tasks = [carried.task for carried in self._carried.values() if carried.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(reader, *tasks, return_exceptions=True)

    def end(self) -> None:
        """Let `serve` return."""
        self._ended = True
        self._news.set()

    async def _read(self, frames: AsyncIterator[worker_pb2.RouterFrame]) -> None:
        try:
            # A router that breaks off is an end like another, and so is our own server's.
            with suppress(grpc.aio.BaseError):
                async for frame in frames:
                    self._take(frame)
        except Exception:  # noqa: BLE001  the edge: what runs on the link hears that it ended
            _log.exception("a link ends: reading a frame of its router failed")
        finally:
            self.end()

    def _take(self, frame: worker_pb2.RouterFrame) -> None:
        for start in frame.starts:
            self._start(start)
        for credit in frame.credits:
            carried = self._carried.get(credit.number)
            if carried is not None:
                carried.credit += credit.credit
                self._is_ready(carried)
        for number in frame.cancels:
            carried = self._carried.get(number)
            if carried is not None:
                carried.cancel()

    def _start(self, start: worker_pb2.LinkStart) -> None:
        number, timeout_s = start.number, start.timeout_s if start.HasField("timeout_s") else None
        if number in self._carried:
            _log.error("a router started a request under the number of one that runs: ignored", number=number)
            return
        ends_at_s = None if timeout_s is None else self._clock.now() + timeout_s
        carried = self._carried[number] = _Carried(number, start.credit)

        def time_remaining() -> float | None:
            return None if ends_at_s is None else ends_at_s - self._clock.now()

        with carrying((("traceparent", start.traceparent), ("tracestate", start.tracestate))):
            task = asyncio.create_task(self._carry(carried, start.request, time_remaining), name=f"link {number}")
        if timeout_s is not None:
            carried.expiry = asyncio.get_running_loop().call_later(max(0.0, timeout_s), carried.cancel)
        carried.task = task
        task.add_done_callback(lambda _: self._forget(number))

    def _forget(self, number: int) -> None:
        self._ready.pop(number, None)
        carried = self._carried.pop(number)
        carried.task = None  # a cancelled one holds its frames, and they hold `carried`
        if carried.expiry is not None:
            carried.expiry.cancel()

    async def _carry(
        self, carried: _Carried, request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining
    ) -> None:
        """One request. A cancelled one says nothing more: nobody listens, or the deadline passed there too."""
        failure: worker_pb2.LinkReply | None = None
        try:
            async with self._running(request, time_remaining) as answer:
                carried.answer = answer
                answer.listen(partial(self._is_ready, carried))
                await carried.sent.wait()
                error = carried.fault or answer.error
                if error is not None or not carried.is_whole:
                    failure = _failure(carried.number, request.request_id, error)
        except Exception as raised:  # noqa: BLE001  the edge: every error becomes a status
            failure = _failure(carried.number, request.request_id, raised)
        finally:
            # They hold what holds them: else only the collector would end them.
            carried.answer = carried.fault = None
        if failure is not None:
            self._failures.append(failure)
            self._news.set()

    def _is_ready(self, carried: _Carried) -> None:
        self._ready[carried.number] = carried
        self._news.set()

    def _frames(self) -> Iterator[worker_pb2.WorkerFrame]:
        """All that is ready, in frames of bounded size."""
        frame, size = worker_pb2.WorkerFrame(), 0
        while self._ready or self._failures:
            reply = self._next_in(frame)
            if reply is None:
                continue
            num_bytes = reply.ByteSize() + _HEADER_BYTES
            if size and size + num_bytes > FRAME_BYTES:
                del frame.replies[-1]
                yield frame
                frame, size = worker_pb2.WorkerFrame(replies=[reply]), 0
            size += num_bytes
        if frame.replies:
            yield frame

    def _next_in(self, frame: worker_pb2.WorkerFrame) -> worker_pb2.LinkReply | None:
        """Put into `frame` a failure, or else a message of the request whose turn it is, if it has one."""
        if self._failures:
            frame.replies.append(self._failures.popleft())
            return frame.replies[-1]
        _, carried = self._ready.popitem(last=False)
        reply = carried.next_in(frame)
        if reply is not None:
            self._ready[carried.number] = carried
        return reply


def _failure(number: int, request_id: str, error: Exception | None) -> worker_pb2.LinkReply:
    """What the router hears of a request that failed; of one that broke off, that."""
    if error is None:
        return worker_pb2.LinkReply(number=number)
    if not isinstance(error, RadixfleetError):
        _log.error("request failed by a fault of ours", request_id=request_id, exc_info=error)
        error = InternalError("internal error")
    return worker_pb2.LinkReply(number=number, status=status_from_error(error).SerializeToString())

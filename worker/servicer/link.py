"""The worker's end of `Worker.Link`: the requests of a router's clients, all on one stream.

    frame of the router --> _take: a task for each new request, which starts it and waits for its end
    engine's message --> Answer --listener--> _ready --> frames, each with all that there is credit for

The one writer takes messages from the answers when the frame before is on its way, so what comes meanwhile is joined
where it waits (see `generation`). Without credit nothing is taken, so a slow reader costs memory bounded by its own
answer, and holds up nobody else.
"""

from __future__ import annotations

import asyncio
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
"""A frame is sent when it has so many; a message that is larger goes alone."""

TimeRemaining: TypeAlias = Callable[[], float | None]
"""Seconds until the client's deadline; None: it has none."""


class Answer(Protocol):
    """The messages of one request, as they come to be; see `Generation`."""

    @property
    def is_over(self) -> bool:
        """All was taken, and nothing more comes."""
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
        """There is something to take."""
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

    def next_in(self, frame: worker_pb2.WorkerFrame) -> worker_pb2.LinkReply | None:
        """Put the next message into `frame`, if there is one, and credit for it."""
        answer = self.answer
        if answer is None:  # credit came before it was started
            return None
        if not self.credit or not answer.has_message:
            if answer.is_over:
                self.sent.set()
            return None
        self.credit -= 1
        reply = frame.replies.add(number=self.number)
        answer.take(reply.response)
        self.is_whole = reply.response.finished.HasField("usage")
        return reply


class _Link:
    """One stream."""

    def __init__(self, running: Running, clock: Clock) -> None:
        self._running = running
        self._clock = clock
        self._carried: dict[int, _Carried] = {}
        self._ready: dict[int, _Carried] = {}
        self._failures: list[worker_pb2.LinkReply] = []
        """Of requests that send nothing more."""
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
            # A router that breaks off is an end like another.
            with suppress(grpc.aio.UsageError, grpc.aio.InternalError):
                async for frame in frames:
                    self._take(frame)
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
            if carried is not None and carried.task is not None:
                carried.task.cancel()

    def _start(self, start: worker_pb2.LinkStart) -> None:
        number, timeout_s = start.number, start.timeout_s if start.HasField("timeout_s") else None
        ends_at_s = None if timeout_s is None else self._clock.now() + timeout_s
        carried = self._carried[number] = _Carried(number, start.credit)

        def time_remaining() -> float | None:
            return None if ends_at_s is None else ends_at_s - self._clock.now()

        with carrying((("traceparent", start.traceparent), ("tracestate", start.tracestate))):
            task = asyncio.create_task(self._carry(carried, start.request, time_remaining), name=f"link {number}")
        if timeout_s is not None:
            carried.expiry = asyncio.get_running_loop().call_later(max(0.0, timeout_s), task.cancel)
        carried.task = task
        task.add_done_callback(lambda _: self._forget(number))

    def _forget(self, number: int) -> None:
        self._ready.pop(number, None)
        expiry = self._carried.pop(number).expiry
        if expiry is not None:
            expiry.cancel()

    async def _carry(
        self, carried: _Carried, request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining
    ) -> None:
        """One request. A cancelled one says nothing more: nobody listens, or the deadline passed there too."""
        error: Exception | None
        try:
            async with self._running(request, time_remaining) as answer:
                carried.answer = answer
                answer.listen(partial(self._is_ready, carried))
                await carried.sent.wait()
                error = answer.error
        except Exception as raised:  # noqa: BLE001  the edge: every error becomes a status
            error = raised
        if error is not None or not carried.is_whole:
            self._failures.append(_failure(carried.number, request.request_id, error))
            self._news.set()

    def _is_ready(self, carried: _Carried) -> None:
        self._ready[carried.number] = carried
        self._news.set()

    def _frames(self) -> Iterator[worker_pb2.WorkerFrame]:
        """All that is ready, in frames of bounded size."""
        frame, size = worker_pb2.WorkerFrame(), 0
        while self._ready:
            carried = self._ready.pop(next(iter(self._ready)))
            while (reply := carried.next_in(frame)) is not None:
                size += reply.ByteSize()
                if size >= FRAME_BYTES:
                    yield frame
                    frame, size = worker_pb2.WorkerFrame(), 0
        failures, self._failures = self._failures, []
        frame.replies.extend(failures)
        if frame.replies:
            yield frame


def _failure(number: int, request_id: str, error: Exception | None) -> worker_pb2.LinkReply:
    """What the router hears of a request that failed; of one that broke off, that."""
    if error is None:
        return worker_pb2.LinkReply(number=number)
    if not isinstance(error, RadixfleetError):
        _log.error("request failed by a fault of ours", request_id=request_id, exc_info=error)
        error = InternalError("internal error")
    return worker_pb2.LinkReply(number=number, status=status_from_error(error).SerializeToString())

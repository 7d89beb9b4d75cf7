"""The worker's end of `Worker.Link`: the requests of a router's clients, all on one stream.

    frame of the router --> _take: a task for each new request --> _outgoing --> frames, each with all that is ready

A request's task asks for its next message only while it has credit. Without credit its tokens are joined where they
wait (see `generation`), so a slow reader costs memory bounded by its own answer, and holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio
import structlog

from radixfleet.batches import batches
from radixfleet.clock import Clock
from radixfleet.errors import InternalError, RadixfleetError
from radixfleet.status import status_from_error
from radixfleet.tracing import carried
from radixfleet.v1 import inference_pb2, worker_pb2

FRAME_BYTES = 1024**2
"""A frame is sent when it has so many; a message that is larger goes alone."""

TimeRemaining: TypeAlias = Callable[[], float | None]
"""Seconds until the client's deadline; None: it has none."""

Answer: TypeAlias = Callable[
    [inference_pb2.GenerateRequest, TimeRemaining], AsyncGenerator[inference_pb2.GenerateResponse, None]
]
"""The messages of one request; raises RadixfleetError. Closing it ends the request."""

Write: TypeAlias = Callable[[worker_pb2.WorkerFrame], Awaitable[None]]

_log = structlog.get_logger(__name__)


class Links:
    """All links of a worker."""

    def __init__(self, answer: Answer, clock: Clock) -> None:
        self._answer = answer
        self._clock = clock
        self._open: set[_Link] = set()

    async def serve(self, frames: AsyncIterator[worker_pb2.RouterFrame], write: Write) -> None:
        """One link, until the router ends it, or `close`. Its requests end with it."""
        link = _Link(self._answer, self._clock)
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
    task: asyncio.Task[None]
    credit: asyncio.Semaphore
    expiry: asyncio.TimerHandle | None


class _Link:
    """One stream. Every reply for it goes through `_outgoing`, in order."""

    def __init__(self, answer: Answer, clock: Clock) -> None:
        self._answer = answer
        self._clock = clock
        self._carried: dict[int, _Carried] = {}
        self._outgoing: list[worker_pb2.LinkReply] = []
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
            tasks = [carried.task for carried in self._carried.values()]
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
                for _ in range(credit.credit):
                    carried.credit.release()
        for number in frame.cancels:
            carried = self._carried.get(number)
            if carried is not None:
                carried.task.cancel()

    def _start(self, start: worker_pb2.LinkStart) -> None:
        number, timeout_s = start.number, start.timeout_s if start.HasField("timeout_s") else None
        ends_at_s = None if timeout_s is None else self._clock.now() + timeout_s
        credit = asyncio.Semaphore(start.credit)

        def time_remaining() -> float | None:
            return None if ends_at_s is None else ends_at_s - self._clock.now()

        with carried((("traceparent", start.traceparent), ("tracestate", start.tracestate))):
            task = asyncio.create_task(
                self._carry(number, start.request, credit, time_remaining), name=f"link {number}"
            )
        loop = asyncio.get_running_loop()
        expiry = None if timeout_s is None else loop.call_later(max(0.0, timeout_s), task.cancel)
        self._carried[number] = _Carried(task, credit, expiry)
        task.add_done_callback(lambda _: self._forget(number))

    def _forget(self, number: int) -> None:
        expiry = self._carried.pop(number).expiry
        if expiry is not None:
            expiry.cancel()

    async def _carry(
        self,
        number: int,
        request: inference_pb2.GenerateRequest,
        credit: asyncio.Semaphore,
        time_remaining: TimeRemaining,
    ) -> None:
        """One request. A cancelled one says nothing more: nobody listens, or the deadline passed there too."""
        try:
            async with aclosing(self._answer(request, time_remaining)) as responses:
                await credit.acquire()
                is_whole = False
                async for response in responses:
                    self._send(worker_pb2.LinkReply(number=number, response=response))
                    is_whole = response.finished.HasField("usage")
                    if not is_whole:
                        await credit.acquire()
                if not is_whole:
                    self._send(worker_pb2.LinkReply(number=number))
        except RadixfleetError as error:
            self._fail(number, error)
        except Exception as error:  # noqa: BLE001  the edge: every error becomes a status
            _log.error("request failed by a fault of ours", request_id=request.request_id, exc_info=error)
            self._fail(number, InternalError("internal error"))

    def _fail(self, number: int, error: RadixfleetError) -> None:
        self._send(worker_pb2.LinkReply(number=number, status=status_from_error(error).SerializeToString()))

    def _send(self, reply: worker_pb2.LinkReply) -> None:
        self._outgoing.append(reply)
        self._news.set()

    def _frames(self) -> list[worker_pb2.WorkerFrame]:
        """All that is ready, in frames of bounded size."""
        replies, self._outgoing = self._outgoing, []
        return [worker_pb2.WorkerFrame(replies=run) for run in batches(replies, FRAME_BYTES)]

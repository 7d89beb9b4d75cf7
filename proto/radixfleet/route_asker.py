"""Look-aside routing by one stream, `Fleet.RouteStream`: what `Client.route` uses where the router knows it.

    route --> _outgoing --> writer --> messages, each with all that came while the last one was written
    route <-- reader <-- messages of the router, each with the answers that were ready

The stream is opened by the first request, and again by the first one after it broke. What is asked when it breaks fails
as a call would, and may be asked again: the router gives up the leases of a stream that broke. On one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from radixfleet.accepted import is_accepted
from radixfleet.errors import Cancelled, DeadlineExceeded, InternalError, RadixfleetError, Unauthenticated, Unavailable
from radixfleet.outgoing import Outgoing
from radixfleet.status import error_from_rpc, error_from_status, was_told
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2

_CUT = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL})
"""What gRPC makes of a router that stops, and of a message that meets the stream's end on its way."""
_RETRY_AFTER_S = 1.0
_GOODBYE_S = 1.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[fleet_pb2.RouteStreamRequest, fleet_pb2.RouteStreamResponse]"


class NotSpoken(Exception):
    """The router does not know `Fleet.RouteStream`."""


class RouteAsker:
    """Asks one router, over one stream at a time: see the head of the module."""

    def __init__(self, stub: fleet_pb2_grpc.FleetStub) -> None:
        self._stub = stub
        self._stream: _Open | None = None

    async def route(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> fleet_pb2.RouteResponse:
        """Ask for a worker and a lease. Cancelling the call takes the request back.

        Raises RadixfleetError as `Fleet.Route` would, or NotSpoken.
        """
        stream = self._opened()
        try:
            return await stream.route(request, timeout_s)
        except Unauthenticated:
            # The key that the stream was opened with was taken back; there may be a new one.
            if not (stream.is_over and stream.was_answered):
                raise
        return await self._opened().route(request, timeout_s)

    def end_lease(self, lease_id: str, cached_tokens: int | None) -> None:
        """Tell the router that a lease has ended. A lease of an earlier stream ended with it, and is passed over."""
        if self._stream is not None and not self._stream.is_over:
            self._stream.end_lease(lease_id, cached_tokens)

    async def close(self) -> None:
        """End the stream, but not its leases."""
        if self._stream is not None:
            await self._stream.close()

    def _opened(self) -> _Open:
        if self._stream is None or self._stream.is_over:
            self._stream = _Open(self._stub.RouteStream())  # type: ignore  # the stubs know no stream that is written to by hand
        return self._stream


class _Open:
    """One stream, from its call to its end."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._numbers = 0
        self._asked: dict[int, asyncio.Future[fleet_pb2.RouteResponse]] = {}
        self._outgoing = Outgoing(fleet_pb2.RouteStreamRequest)
        self._work = asyncio.Event()
        self.is_over = False
        self.was_answered = False
        self._reader = asyncio.create_task(self._read(), name="read routes")
        self._writer = asyncio.create_task(self._write(), name="write routes")

    async def route(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> fleet_pb2.RouteResponse:
        """See `RouteAsker`. The router is told `timeout_s`, and it is kept here too: one that hangs costs no more."""
        number = self._ask(request, timeout_s)
        answer: asyncio.Future[fleet_pb2.RouteResponse] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self._leave(number, answer)
            raise DeadlineExceeded("the router did not answer") from None
        except asyncio.CancelledError:
            self._leave(number, answer)
            raise

    def end_lease(self, lease_id: str, cached_tokens: int | None) -> None:
        """See `RouteAsker`."""
        if not self.is_over:
            self._outgoing.last.ends.add(lease_id=lease_id, cached_tokens=cached_tokens)
            self._work.set()

    async def close(self) -> None:
        """Take back what is asked and not answered, and end the stream; its leases stay."""
        if not self.is_over:
            self._outgoing.last.keep_leases = True
            self._outgoing.last.cancels.extend(self._asked)
            self._fail(lambda: Cancelled("the client was closed"))
            self.is_over = True
            self._work.set()
            await asyncio.wait([self._reader], timeout=_GOODBYE_S)
        self._call.cancel()
        self._writer.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    def _leave(self, number: int, answer: asyncio.Future[fleet_pb2.RouteResponse]) -> None:
        """Nobody waits for the answer any more. It may have come in this very turn of the event loop."""
        if self._asked.pop(number, None) is not None:
            self._outgoing.last.cancels.append(number)
            self._work.set()
        elif answer.done() and not answer.cancelled() and answer.exception() is None:
            self.end_lease(answer.result().lease_id, None)

    def _ask(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> int:
        self._numbers += 1
        message = self._outgoing.with_room_for(request.ByteSize())
        message.asks.add(number=self._numbers, request=request, timeout_s=timeout_s)
        self._work.set()
        return self._numbers

    async def _write(self) -> None:
        # What cannot be written is lost with the stream, of whose end the reader tells.
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            if not await is_accepted(self._call):
                return  # the reader tells why
            while not self.is_over:
                await self._work.wait()
                self._work.clear()
                await self._write_all()
            await self._write_all()  # what was added during the last write
            await self._call.done_writing()

    async def _write_all(self) -> None:
        for message in self._outgoing.take():
            if message.ByteSize():
                await self._call.write(message)

    async def _read(self) -> None:
        try:
            while True:
                message = await self._call.read()
                if not isinstance(message, fleet_pb2.RouteStreamResponse):
                    break
                self.was_answered = True
                for answer in message.answers:
                    self._take(answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._end(NotSpoken)
            elif error.code() not in _CUT or was_told(error):
                self._end(partial(error_from_rpc, error))
        finally:
            self._end(lambda: Unavailable("the router ended the stream", retry_after_s=_RETRY_AFTER_S))

    def _take(self, answer: fleet_pb2.RouteAnswer) -> None:
        asked = self._asked.pop(answer.number, None)
        if asked is None or asked.done():  # taken back meanwhile
            if answer.HasField("route"):
                self.end_lease(answer.route.lease_id, None)
        elif answer.HasField("route"):
            asked.set_result(answer.route)
        else:
            asked.set_exception(_error(answer.status))

    def _end(self, error: Callable[[], Exception]) -> None:
        """Nothing more comes: tell all who wait."""
        self.is_over = True
        self._call.cancel()
        self._writer.cancel()
        self._fail(error)

    def _fail(self, error: Callable[[], Exception]) -> None:
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(error())


def _error(status: bytes) -> RadixfleetError:
    try:
        return error_from_status(status_pb2.Status.FromString(status))
    except DecodeError:
        return InternalError("the router answered with a status that is none")

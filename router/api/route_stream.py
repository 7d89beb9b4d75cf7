"""One stream of `Fleet.RouteStream`: the requests of a client that streams from the workers itself.

    message of the client --> _take: each ask is routed at once, or by a task of its own --> _answers
    _answers --> _write_answers, a task: messages, each with all that is ready

A call of gRPC costs the router some 140 us of CPU; a message of a stream costs 20, for all that is in it. Most asks
are answered in the turn of the event loop that takes them, at most `A_TURN` of a message, and those go out in one; and
what is taken while a message is written goes out in the next. A client that does not read its answers is not read from
while `MOST_OPEN` of them are open.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeAlias

import grpc.aio
import structlog

from radixfleet.batches import batches
from radixfleet.errors import DeadlineExceeded, InternalError, InvalidRequest, RadixfleetError
from radixfleet.status import status_from_error
from radixfleet.v1 import fleet_pb2
from router.api.routing import Routing, Waiting
from router.dispatch.dispatcher import Deadline
from router.dispatch.lookaside import Owner

MOST_OPEN = 1024
"""Asks of one stream that have come and are not answered yet."""
A_TURN = 128
"""Asks of one message that a turn of the event loop takes, at some 100 us each, before others have theirs."""
_MESSAGE_BYTES = 1024**2
"""A message is sent when it has so many; an answer that is larger goes alone."""

Write: TypeAlias = Callable[[fleet_pb2.RouteStreamResponse], Awaitable[None]]
Visit: TypeAlias = Callable[[], AbstractContextManager[None]]

_log = structlog.get_logger("radixfleet.router.routing")


class RouteStream:
    """See the module. On the event loop only."""

    def __init__(self, routing: Routing, write: Write, visit: Visit | None = None) -> None:
        """`visit` counts one request against its client's limits, and raises Overloaded; None: there are none."""
        self._routing = routing
        self._write = write
        self._visit = visit
        self._leases: Owner = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: list[fleet_pb2.RouteAnswer] = []
        self._has_answers = asyncio.Event()
        self._num_open = 0
        self._keeps_leases = False
        self._closed_some = asyncio.Event()

    async def serve(self, messages: AsyncIterator[fleet_pb2.RouteStreamRequest]) -> None:
        """Serve until the client has ended its side and has every answer, or breaks off."""
        reader = asyncio.create_task(self._read(messages))
        writer = asyncio.create_task(self._write_answers())
        try:
            # The writer ends of its own accord only when nobody takes answers any more: no use in reading on.
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            (writer if writer.done() else reader).result()
        except grpc.aio.BaseError:
            pass  # what gRPC calls a client that breaks off, or a server that stops
        finally:
            await self._end(reader, writer)

    async def _read(self, messages: AsyncIterator[fleet_pb2.RouteStreamRequest]) -> None:
        async for message in messages:
            await self._take(message)
            self._wake_writer()
            await self._until_open(MOST_OPEN - 1)
        await self._until_open(0)

    async def _until_open(self, most: int) -> None:
        while self._num_open > most:
            self._closed_some.clear()
            await self._closed_some.wait()

    async def _end(self, reader: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
        tasks = [reader, *self._tasks.values(), writer]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # gRPC may cancel a broken stream twice
            if not self._keeps_leases:
                self._routing.look_aside.leave(self._leases)

    async def _take(self, message: fleet_pb2.RouteStreamRequest) -> None:
        self._keeps_leases |= message.keep_leases
        for end in message.ends:
            if end.lease_id in self._leases:
                cached_tokens = end.cached_tokens if end.HasField("cached_tokens") else None
                self._routing.look_aside.end(end.lease_id, cached_tokens)
        for count, ask in enumerate(message.asks, start=1):
            self._num_open += 1
            try:
                self._begin(ask)
            except Exception as error:  # noqa: BLE001  the edge: every error becomes a status
                self._fail(ask.number, error)
            if count % A_TURN == 0:
                self._wake_writer()
                await asyncio.sleep(0)
        for number in message.cancels:
            task = self._tasks.get(number)
            if task is not None:
                task.cancel()

    def _begin(self, ask: fleet_pb2.RouteAsk) -> None:
        """Answer it, or start a task that will; as a visit of its client, where those are counted."""
        number = ask.number
        if number in self._tasks:
            raise InvalidRequest(f"number {number} is that of another ask, which is not answered yet", field="number")
        deadline = _deadline(ask)
        if self._visit is None:
            self._route(ask, deadline, ExitStack)
            return
        with ExitStack() as visit:
            visit.enter_context(self._visit())
            self._route(ask, deadline, visit.pop_all)

    def _route(self, ask: fleet_pb2.RouteAsk, deadline: Deadline, prolong: Callable[[], ExitStack]) -> None:
        """Answer the ask now, or start a task. `prolong`: makes the visit last until the stack it returns is closed."""
        answer = fleet_pb2.RouteAnswer(number=ask.number)
        waiting = self._routing.begin(ask.request, deadline, answer.route, self._leases)
        if waiting is None:
            self._answers.append(answer)
        else:
            self._later(answer, waiting, deadline, prolong())

    def _later(self, answer: fleet_pb2.RouteAnswer, waiting: Waiting, deadline: Deadline, visit: ExitStack) -> None:
        """Answer the ask by a task of its own; `visit` is closed when the task has ended."""
        task = self._tasks[answer.number] = asyncio.create_task(self._wait(answer, waiting, deadline))
        visit.callback(self._waited, answer.number, task)
        task.add_done_callback(lambda _: visit.close())

    async def _wait(self, answer: fleet_pb2.RouteAnswer, waiting: Waiting, deadline: Deadline) -> None:
        number = answer.number
        try:
            async with asyncio.timeout(deadline()):
                await waiting()
            self._answers.append(answer)
        except TimeoutError:
            self._fail(number, DeadlineExceeded("the deadline passed before a worker was chosen"))
        except Exception as error:  # noqa: BLE001  the edge: every error becomes a status
            self._fail(number, error)

    def _waited(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if task.cancelled():  # which a task that never ran cannot tell itself
            self._close(1)
        self._wake_writer()

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, RadixfleetError):
            incident = secrets.token_hex(4)
            _log.error("routing failed by a fault of ours", incident=incident, exc_info=error)
            error = InternalError(f"internal error (incident {incident} in the server's log)")
        status = status_from_error(error).SerializeToString()
        self._answers.append(fleet_pb2.RouteAnswer(number=number, status=status))

    def _wake_writer(self) -> None:
        if self._answers:
            self._has_answers.set()

    async def _write_answers(self) -> None:
        """Write all that is ready, and what gets ready meanwhile, until cancelled or the client is gone."""
        while True:
            await self._has_answers.wait()
            self._has_answers.clear()
            ready, self._answers = self._answers, []
            for answers in batches(ready, _MESSAGE_BYTES):
                await self._write(fleet_pb2.RouteStreamResponse(answers=answers))
                self._close(len(answers))

    def _close(self, count: int) -> None:
        self._num_open -= count
        self._closed_some.set()


def _deadline(ask: fleet_pb2.RouteAsk) -> Deadline:
    """Counts from now. Raises InvalidRequest, or DeadlineExceeded where there is nothing to count."""
    if not ask.HasField("timeout_s"):
        return _forever
    timeout_s = ask.timeout_s
    if math.isnan(timeout_s):
        raise InvalidRequest("timeout_s is not a number", field="timeout_s")
    if timeout_s <= 0:
        raise DeadlineExceeded("the deadline passed before a worker was chosen")
    time_s = asyncio.get_running_loop().time
    ends_at_s = time_s() + timeout_s
    return lambda: ends_at_s - time_s()


def _forever() -> None:
    """No deadline."""

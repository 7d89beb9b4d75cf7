"""One stream of `Worker.Link`, from its call to its end.

    start, give_credit, leave --> _outgoing --> writer --> frames, each with all that came during the last, but bounded
    inbox of the request <------------------- reader <-- frames of the worker

When it ends, however it does, all who wait for something on it are told why.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from radixfleet.accepted import is_accepted
from radixfleet.outgoing import Outgoing
from radixfleet.status import error_from_status
from radixfleet.tracing import headers
from radixfleet.v1 import worker_pb2
from router.dispatch.inbox import Inbox
from router.dispatch.link import LinkFailure, Reply, broken, deadline_passed, failure_of, refused, reply_of
from router.dispatch.request import PreparedRequest

CREDIT = 32
"""Messages of one request that may be on the way; half of it is given back at a time. They are counted, not weighed: a
client that reads nothing of the log probabilities of a long prompt leaves so many messages of 200 kB in its inbox.
"""

_Stream: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.RouterFrame, worker_pb2.WorkerFrame]"


_REFUSAL_S = 2.0
"""A refusal comes a moment after its metadata."""


class NotSpoken(Exception):
    """The worker does not know `Worker.Link`, or not as we do."""


class OpenLink:
    """See the module. On the event loop only."""

    def __init__(self, call: _Stream, worker: str) -> None:
        self._call = call
        self._worker = worker
        self._inboxes: dict[int, Inbox] = {}
        self._late: dict[int, asyncio.TimerHandle] = {}
        """Deadlines, by the request's number."""
        self._numbers = 0
        self._outgoing = Outgoing(worker_pb2.RouterFrame)
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

    def start(self, request: PreparedRequest, num_bytes: int, timeout_s: float | None) -> tuple[int, Inbox]:
        """Send the request, of this size; its number, and where the answer comes. To be followed by `leave`.

        Raises LinkFailure.
        """
        if self.is_over:
            raise broken(self._worker, "the link broke")
        self._numbers += 1
        number = self._numbers
        inbox = self._inboxes[number] = Inbox()
        self._outgoing.with_room_for(num_bytes).starts.add(
            number=number, request=request.message, timeout_s=timeout_s, credit=CREDIT, **headers()
        )
        self._work.set()
        if timeout_s is not None:
            failure = deadline_passed("the deadline passed on the link")
            self._late[number] = asyncio.get_running_loop().call_later(max(0.0, timeout_s), inbox.put, failure)
        return number, inbox

    def give_credit(self, number: int, credit: int) -> None:
        """So many messages of the request were read."""
        self._outgoing.last.credits.add(number=number, credit=credit)
        self._work.set()

    def leave(self, number: int) -> None:
        """Nobody reads the request's answer any more; it ends at the worker, if it has not."""
        late = self._late.pop(number, None)
        if late is not None:
            late.cancel()
        if self._inboxes.pop(number, None) is not None and not self.is_over:
            self._outgoing.last.cancels.append(number)
            self._work.set()

    async def close(self) -> None:
        """End it."""
        self.end(broken(self._worker, "the link was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    async def _greet(self) -> None:
        """Wait for the first word of the worker."""
        try:
            if not await is_accepted(self._call):
                async with asyncio.timeout(_REFUSAL_S):
                    await self._call.read()  # raises the status
                failure = broken(self._worker, "it takes no link")
                self.end(failure)
                raise failure
        except TimeoutError:  # it waits for requests, as an earlier version did without the mark
            self.end(broken(self._worker, "it takes links of another version"))
            raise NotSpoken from None
        except grpc.aio.AioRpcError as error:
            self.end(failure_of(error, self._worker))
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotSpoken from None
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
        except (LinkFailure, NotSpoken):
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
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, LinkFailure, NotSpoken):
            await asyncio.shield(self.known)
            while not self.is_over:
                await self._work.wait()
                self._work.clear()
                for frame in self._outgoing.take():
                    await self._call.write(frame)


def _failure(status: bytes, worker: str) -> LinkFailure:
    try:
        message: Any = status_pb2.Status.FromString(status)
    except DecodeError:
        return broken(worker, "a status that is none")
    return refused(error_from_status(message))

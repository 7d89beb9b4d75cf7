"""How a request reaches its worker, behind a protocol; and the first way: a call of its own for each request.

Messages of the worker are passed on as they are. Each is decoded once, by protobuf's C code, which costs a microsecond
beside the 40 to 98 of the gRPC call around it, and gives what the router must know: cached tokens and token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import grpc.aio

from radixfleet.cancellation import is_cancelled
from radixfleet.errors import DeadlineExceeded, RadixfleetError, Unavailable
from radixfleet.status import broke, error_from_rpc, until_status
from radixfleet.tracing import headers
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from router.dispatch.request import PreparedRequest

FailureKind: TypeAlias = Literal["transport", "fault", "deadline", "answer"]
"""Of a request at a worker.

transport  the worker could not be reached, or the connection broke
fault      it was reached, and what it answered is none
deadline   the request's own deadline passed
answer     the worker said no in its own words
"""

_Call: TypeAlias = "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"

_RETRY_AFTER_S = 1.0
_MOST_TOLD = 200


@dataclass(slots=True)  # not frozen: there is one a token, and making a frozen one takes a microsecond more
class Reply:
    """One message of a worker; nobody changes it but who made it."""

    kind: Literal["started", "part", "end"]
    """started: the first one. end: the last one, which has the usage. part: whatever comes between."""
    message: inference_pb2.GenerateResponse
    token_ids: Sequence[int] = ()
    """New tokens in it."""
    index: int = 0
    """Which of the request's completions they belong to."""
    cached_tokens: int | None = 0
    """Cached prompt tokens, in the first and the last message; None: the worker does not tell, or not yet."""

    @property
    def num_tokens(self) -> int:
        """New tokens; of an engine that tells no ids, a piece of text is taken for one."""
        return len(self.token_ids) or int(bool(self.message.delta.text))


class LinkFailure(Exception):
    """The request failed at the worker. `error` is what the client may hear."""

    def __init__(self, kind: FailureKind, error: RadixfleetError, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.error = error


class WorkerLink(Protocol):
    """One worker, as dispatch sees it."""

    def generate(self, request: PreparedRequest, timeout_s: float | None) -> AsyncGenerator[Reply, None]:
        """The worker's replies; the last one is "end". Raises LinkFailure.

        The next reply is taken from the worker when it is asked for, so a slow reader holds the worker back. Closing
        the iterator ends the request at the worker.
        """
        ...


class CallLink:
    """One `Inference.Generate` call a request, on the worker's channel."""

    def __init__(self, channel: grpc.aio.Channel, worker: str) -> None:
        """`worker`: its name, for messages."""
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._worker = worker
        self._calls: set[_Call] = set()

    def cut(self) -> None:
        """The worker hangs: give up all calls."""
        for call in self._calls:
            call.cancel()

    async def generate(self, request: PreparedRequest, timeout_s: float | None) -> AsyncGenerator[Reply, None]:
        """See `WorkerLink`."""
        call = self._stub.Generate(request.message, timeout=timeout_s, metadata=tuple(headers().items()))
        self._calls.add(call)
        try:
            while True:
                message = await call.read()
                if not isinstance(message, inference_pb2.GenerateResponse):
                    raise broken(self._worker, "the stream ended without its last message")
                reply = reply_of(message)
                yield reply
                if reply.kind == "end":
                    await until_status(call)
                    return
        except grpc.aio.AioRpcError as error:
            raise failure_of(error, self._worker) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise broken(self._worker, "the worker says nothing, or its channel was closed") from None
        finally:
            self._calls.discard(call)
            call.cancel()


def failure_of(error: grpc.aio.AioRpcError, worker: str) -> LinkFailure:
    """What a failed call to `worker` means."""
    if broke(error):
        return broken(worker, f"{error.code().name}: {error.details()}")
    return refused(error_from_rpc(error))


def broken(worker: str, detail: str) -> LinkFailure:
    """The connection to `worker` is gone. `detail`, here and below, is for the log."""
    error = Unavailable(f"worker {worker} cannot be reached", retry_after_s=_RETRY_AFTER_S)
    return LinkFailure("transport", error, detail)


def faulty(worker: str, detail: str) -> LinkFailure:
    """`worker` was reached and did not do what was asked. The client hears the beginning of `detail`."""
    text = detail if len(detail) <= _MOST_TOLD else f"{detail[:_MOST_TOLD]} ..."
    return LinkFailure("fault", Unavailable(f"worker {worker} failed: {text}", retry_after_s=_RETRY_AFTER_S), detail)


def deadline_passed(detail: str) -> LinkFailure:
    """The request's deadline passed."""
    return LinkFailure("deadline", DeadlineExceeded("the deadline passed before the answer was there"), detail)


def refused(error: RadixfleetError) -> LinkFailure:
    """The worker said no, or that the deadline passed there."""
    detail = f"{error.code}: {error}"
    return deadline_passed(detail) if isinstance(error, DeadlineExceeded) else LinkFailure("answer", error, detail)


def reply_of(message: inference_pb2.GenerateResponse) -> Reply:
    """What the router must know of a message."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return Reply("part", message, message.delta.token_ids, message.index)
    if kind == "started":
        started = message.started
        return Reply("started", message, cached_tokens=None if started.counts_follow else started.cached_tokens)
    if kind == "finished" and message.finished.HasField("usage"):
        usage = message.finished.usage
        return Reply("end", message, cached_tokens=None if usage.cached_tokens_unknown else usage.cached_tokens)
    # The end of one of several completions, log probabilities of the prompt, or what a later version says.
    return Reply("part", message)


def joined(first: Reply, second: Reply) -> bool:
    """Make one of two replies that follow each other, in `first`: new tokens of the same completion. False: they stay.

    For readers that are behind: a message costs the router as much as the client, whatever is in it.
    """
    if not (first.token_ids and second.token_ids and first.index == second.index):
        return False
    delta, more = first.message.delta, second.message.delta
    text = delta.text + more.text
    delta.MergeFrom(more)  # token ids and log probabilities are appended to
    delta.text = text
    return True

"""Errors as gRPC statuses and back: the one mapping table is the tree in `errors`.

A status carries google.rpc details: ErrorInfo{reason, domain "radixfleet", metadata} always, RetryInfo where trying
again can help, BadRequest where a field is at fault. From them `error_from_rpc` makes the same error again on the other
side, so a router passes a worker's error on unchanged.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias

import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from radixfleet import errors
from radixfleet.counts import counted
from radixfleet.errors import RadixfleetError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""Of a call, on the side that serves it."""

DOMAIN = "radixfleet"
DEADLINE_PASSED = "Deadline Exceeded"
"""What gRPC says when it ends a call by itself."""
_DETAILS_KEY = "grpc-status-details-bin"
_MAX_MESSAGE_BYTES = 800
_MAX_METADATA_BYTES = 200
_MAX_METADATA_ENTRIES = 8
"""Clients refuse trailers over 8 KiB, and with them the error. The message travels three times: once percent-encoded (3
bytes for one) and twice in the details (base64, 4 for 3); these bounds stay under 7 KiB at the worst."""

_BY_CODE: dict[grpc.StatusCode, type[RadixfleetError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.UnknownModel,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
}
"""For statuses without our ErrorInfo: made by gRPC itself, or by another engine."""

_BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""What gRPC makes of connections that are refused, break, or are reset, and of servers that stop."""
_LATE = f"Stream removed ({DEADLINE_PASSED})"
"""What gRPC makes of a deadline that passes before the stream has begun, or as the connection ends."""
_STATUS_S = 1.0
_RETRY_AFTER_S = 1.0
_LONGEST_RETRY_S = 86400.0
"""A Duration has an end, and what one worker asks for is passed on to others."""
_NOT_CONNECTED = re.compile(r"failed to connect to all addresses;.*ipv[46]:([^\s]+): .*remote host: (.+)")
_WENT_AWAY = re.compile(r"Stream removed|GOAWAY")
"""In gRPC's lengthy messages: the connection stood, and then broke."""


def status_from_error(error: RadixfleetError) -> status_pb2.Status:
    """The google.rpc.Status of an error, details included."""
    message = _clip(str(error), _MAX_MESSAGE_BYTES)
    entries = list(error.metadata.items())[:_MAX_METADATA_ENTRIES]
    metadata = {key: _clip(value, _MAX_METADATA_BYTES) for key, value in entries}
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(min(max(error.retry_after_s, 0.0), _LONGEST_RETRY_S) * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, errors.InvalidRequest) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = []
    for detail in details:
        holder = any_pb2.Any()
        holder.Pack(detail)
        packed.append(holder)
    return status_pb2.Status(code=grpc.StatusCode[error.code].value[0], message=message, details=packed)


async def abort_with(context: Context, error: RadixfleetError) -> NoReturn:
    """End the call with the error's status. Servicers need not: what they raise is mapped by `ErrorInterceptor`."""
    status = rpc_status.to_status(status_from_error(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def error_from_rpc(call_error: grpc.aio.AioRpcError) -> RadixfleetError:
    """The error that a failed call stands for: the very one that the other side raised, where it was one of ours."""
    code, message = call_error.code(), call_error.details() or call_error.code().name
    status = _rich_status(call_error)
    error = _by_grpc(code, message) if status is None else _from_details(status, message)
    if error is not None:
        return error
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return errors.InvalidRequest(f"the message is larger than the other side takes ({message})")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.InternalError(f"the server does not implement this call ({message})")
    return _BY_CODE.get(code, errors.InternalError)(message)


def _by_grpc(code: grpc.StatusCode, message: str) -> RadixfleetError | None:
    """Of a status without details: what happened, where it is one that gRPC makes by itself."""
    if message == _LATE:
        return errors.DeadlineExceeded(DEADLINE_PASSED)
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.Unreachable(_in_plain_words(message))
    if code is grpc.StatusCode.CANCELLED:
        # By the server: one that stops drops calls that it has not begun. What is cancelled here is a CancelledError.
        return errors.Unreachable(f"the server dropped the call, as one does that stops ({message})")
    return None


def _in_plain_words(message: str) -> str:
    """What gRPC tells in its own terms of a server that went away, or has one address and does not answer."""
    if _WENT_AWAY.search(message):
        return "the server went away"
    found = _NOT_CONNECTED.fullmatch(message)
    if found is None:
        return message
    return f"nothing answers at {found[1].replace('%5B', '[').replace('%5D', ']')}: {found[2]}"


def stream_error(call_error: grpc.aio.AioRpcError, address: str, delivered_tokens: int | None) -> RadixfleetError:
    """`error_from_rpc`, but an answer whose connection to `address` broke says how far it got, and what to do.

    gRPC's own words for that ("Socket closed") tell neither. An error that the other side raised tells it itself.
    `delivered_tokens`: None while the answer has not begun.
    """
    if delivered_tokens is None or not broke(call_error):
        return error_from_rpc(call_error)
    why = _in_plain_words(call_error.details() or "the server went away")
    error = errors.Unavailable(
        f"the connection to {address} broke after {counted(delivered_tokens, 'token')}: the answer is not complete. "
        f"Send the request again; what was computed of its prompt is most likely still cached ({why})"
    )
    error.retry_after_s = _RETRY_AFTER_S
    error.metadata = {"delivered_tokens": str(delivered_tokens)}
    return error


def error_from_status(status: status_pb2.Status) -> RadixfleetError:
    """The error that `status_from_error` made `status` of; for statuses of others, the nearest one."""
    code = next((code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN)
    message = status.message or code.name
    return _from_details(status, message) or _BY_CODE.get(code, errors.InternalError)(message)


def broke(call_error: grpc.aio.AioRpcError) -> bool:
    """The connection broke, or there was none, rather than that the other side or the deadline ended the call."""
    return call_error.code() in _BROKEN and call_error.details() != _LATE and not was_told(call_error)


async def until_status(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Wait a moment for the status after a call's last message: a cancel before it is there would say that we left.

    Cancel the call afterwards: gRPC leaves one that nobody ends open for as long as its server does.
    """
    with suppress(TimeoutError, grpc.aio.AioRpcError):
        async with asyncio.timeout(_STATUS_S):
            await call.read()


def was_told(call_error: grpc.aio.AioRpcError) -> bool:
    """The other side raised it, with details; False: gRPC made it, here or there, of what happened to the call."""
    return _rich_status(call_error) is not None


def _rich_status(call_error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    trailers: Any = call_error.trailing_metadata() or ()  # the stubs know no aio.Metadata here
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _from_details(status: status_pb2.Status, message: str) -> RadixfleetError | None:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    retry_after_s = None
    try:
        for detail in status.details:
            if detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
            elif not detail.Unpack(bad_request):
                detail.Unpack(info)
    except DecodeError:
        return None
    kind = errors.BY_REASON.get(info.reason)
    if info.domain != DOMAIN or kind is None:
        return None
    error = kind(message)
    error.retry_after_s = retry_after_s
    error.metadata = dict(info.metadata)
    if isinstance(error, errors.InvalidRequest) and bad_request.field_violations:
        error.field = bad_request.field_violations[0].field
    return error


def _clip(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= max_bytes else data[: max_bytes - 3].decode("utf-8", "ignore") + "..."

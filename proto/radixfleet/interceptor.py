"""What stands between gRPC and every servicer: errors become statuses, and undecodable requests are refused by name.

A servicer raises a RadixfleetError and the client gets its status. A failed call of ours that nobody translated
(AioRpcError) passes on as what it stands for. Anything else is our fault: logged once, with the traceback, and the
client hears "internal error" and a number to find it by. Cancellation is never touched.

A request with invalid UTF-8 in a string would otherwise end with UNKNOWN and the name of a Python class: protobuf
refuses it before any servicer runs. So requests are decoded here, and the field at fault is found by reading the same
bytes with a schema in which strings are bytes.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import grpc.aio
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from radixfleet.errors import InternalError, InvalidRequest, RadixfleetError
from radixfleet.status import abort_with, error_from_rpc

_log = structlog.get_logger("radixfleet.grpc")


@dataclass(frozen=True, slots=True)
class _Undecodable:
    error: InvalidRequest


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Wraps every method of the server it is given to. `make_server` installs it."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of the method, wrapped; once for each method of the server."""
        method = handler_call_details.method
        if method not in self._wrapped:
            handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(handler_call_details)
            if handler is None:
                return handler  # type: ignore[return-value]  # how gRPC says that there is no such method
            self._wrapped[method] = _wrap(handler, method)
        return self._wrapped[method]


def _wrap(handler: Any, method: str) -> Any:
    decoder = _decoder(handler.request_deserializer)
    if handler.unary_unary or handler.stream_unary:
        answer = _one_response(handler.unary_unary or handler.stream_unary, method)
        kind = grpc.stream_unary_rpc_method_handler if handler.stream_unary else grpc.unary_unary_rpc_method_handler
        return kind(answer, decoder, handler.response_serializer)
    stream = _many_responses(handler.unary_stream or handler.stream_stream, method)
    kind = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
    return kind(stream, decoder, handler.response_serializer)


def _one_response(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except Exception as error:  # noqa: BLE001  the edge: every error becomes a status
            await _abort(context, error, method)

    return answer


def _many_responses(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            responses = behaviour(_checked(request), context)
            if inspect.isawaitable(responses):  # writes to the context by itself
                await responses
                return
            async with aclosing(responses):
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001  the edge: every error becomes a status
            await _abort(context, error, method)

    return stream


async def _abort(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, RadixfleetError):
        await abort_with(context, error)
    if isinstance(error, grpc.aio.AioRpcError):
        await abort_with(context, error_from_rpc(error))
    incident = secrets.token_hex(4)
    _log.error("request failed by a fault of ours", method=method, incident=incident, exc_info=error)
    await abort_with(context, InternalError(f"internal error (incident {incident} in the server's log)"))


def _decoder(inner: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if inner is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return inner(data)
        except DecodeError:
            return _Undecodable(_refusal(getattr(inner, "__self__", None), data))

    return decode


def _checked(request: Any) -> Any:
    """The request, or the stream of requests, that raises where one cannot be decoded."""
    if isinstance(request, _Undecodable):
        raise request.error
    return _checked_stream(request) if hasattr(request, "__aiter__") else request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Undecodable):
            raise request.error
        yield request


def _refusal(message_class: Any, data: bytes) -> InvalidRequest:
    descriptor: Descriptor | None = getattr(message_class, "DESCRIPTOR", None)
    field = bad_utf8_field(descriptor, data) if descriptor is not None else None
    if field is not None:
        return InvalidRequest(f"{field} is not valid UTF-8", field=field)
    return InvalidRequest(f"the request is not a {descriptor.full_name if descriptor else 'protobuf'} message")


def bad_utf8_field(descriptor: Descriptor, data: bytes) -> str | None:
    """Path of the first string field that is not UTF-8 in the encoded message: "prompt.chat.messages[1].content"."""
    try:
        raw = _bytes_schema(descriptor)()
        raw.ParseFromString(data)
    except DecodeError:
        return None
    return _first_bad(raw, descriptor)


def _first_bad(raw: Message, descriptor: Descriptor) -> str | None:
    for field, value in raw.ListFields():
        original = descriptor.fields_by_number[field.number]
        for index, item in enumerate(value if field.is_repeated else [value]):
            name = f"{field.name}[{index}]" if field.is_repeated else field.name
            if original.type == FieldDescriptor.TYPE_STRING and not _is_utf8(item):
                return name
            if original.message_type is not None and isinstance(item, Message):
                below = _first_bad(item, original.message_type)
                if below is not None:
                    return f"{name}.{below}"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@cache
def _bytes_schema(descriptor: Descriptor) -> type[Message]:
    """The class of the same message with every string field as bytes."""
    pool = descriptor_pool.DescriptorPool()
    _add_file(pool, descriptor.file, set())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add_file(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_file(pool, dependency, added)
    schema = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(schema)
    pending = list(schema.message_type)
    while pending:
        message = pending.pop()
        pending += [nested for nested in message.nested_type if not nested.options.map_entry]
        for field in message.field:
            if field.type == descriptor_pb2.FieldDescriptorProto.TYPE_STRING:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
                field.ClearField("default_value")
    pool.AddSerializedFile(schema.SerializeToString())

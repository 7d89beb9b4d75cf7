"""The guard of a gRPC server: which door each method is, and an interceptor that lets nobody past it unseen.

A method that is not in the table is a CLIENT door, and one of `Fleet` or `Worker` an ADMIN door, so that a method that
is added is closed until it is opened here. A refused call ends before its request is read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from radixfleet.errors import RadixfleetError
from radixfleet.guard import Caller, Door, Guard, current_caller, key_of, remember
from radixfleet.keyed_channel import KEY_HEADER
from radixfleet.status import abort_with

_OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
_ADMIN_SERVICES = frozenset({"radixfleet.v1.Fleet", "radixfleet.v1.Worker", "sglang.grpc.scheduler.SglangScheduler"})
_CLIENT_METHODS = frozenset(
    {
        "/radixfleet.v1.Fleet/Route",
        "/radixfleet.v1.Fleet/RouteStream",
        "/radixfleet.v1.Fleet/Explain",
        "/radixfleet.v1.Fleet/ListWorkers",
        "/radixfleet.v1.Fleet/WatchFleet",
    }
)
_UNCOUNTED_SERVICES = frozenset({"grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"})
_UNCOUNTED_METHODS = frozenset(
    {
        "/radixfleet.v1.Fleet/ListWorkers",
        "/radixfleet.v1.Fleet/WatchFleet",
        "/radixfleet.v1.Fleet/RouteStream",
        "/radixfleet.v1.Inference/GetModelInfo",
    }
)
"""Looking is not work: it takes nothing from a client's limits. A stream counts its requests itself: see `Visitor`."""


def door_of(method: str) -> Door:
    """The door of a method, such as "/radixfleet.v1.Inference/Generate"."""
    service = _service(method)
    if service in _OPEN_SERVICES:
        return Door.OPEN
    if method in _CLIENT_METHODS or service not in _ADMIN_SERVICES:
        return Door.CLIENT
    return Door.ADMIN


def is_work(method: str) -> bool:
    """Whether a call counts against its client's limits."""
    return (
        door_of(method) is Door.CLIENT
        and _service(method) not in _UNCOUNTED_SERVICES
        and method not in _UNCOUNTED_METHODS
    )


class GuardInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Outermost of a server's interceptors: `make_server` installs it."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's handler, or one that refuses the call."""
        method = handler_call_details.method
        try:
            caller = self._guard.admit(door_of(method), _key(handler_call_details))
        except RadixfleetError as error:
            return _refusal(error)
        # gRPC runs interceptors and handler of a call in one task, so the context reaches the servicer.
        remember(caller)
        handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(handler_call_details)
        if handler is None or not self._guard.has_limits or not is_work(method):
            return handler  # type: ignore[return-value]  # None is how gRPC says that there is no such method
        return _counted(handler, self._guard, caller)


class Visitor:
    """The client of a stream that carries many requests and outlives keys. Make it within the call."""

    def __init__(self, guard: Guard, context: Any) -> None:
        """`context`: of a call that came in by a CLIENT door."""
        self._guard = guard
        self._caller = current_caller()
        self._host = peer_host(context.peer())
        self._key = _key_in(context.invocation_metadata())

    async def admitted(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The messages, for as long as the client's key is known here. Raises Unauthenticated."""
        async for message in messages:
            self._guard.admit(Door.CLIENT, self._key)
            yield message

    def visit(self) -> AbstractContextManager[None]:
        """One of the requests, counted against the client's limits. Raises Overloaded."""
        return self._guard.visit(self._caller, self._host)


def _service(method: str) -> str:
    return method[1:].partition("/")[0]


def _key(details: grpc.HandlerCallDetails) -> str | None:
    return _key_in(details.invocation_metadata)


def _key_in(metadata: Any) -> str | None:
    for name, value in metadata or ():
        if name == KEY_HEADER:
            return key_of(value if isinstance(value, str) else value.decode("utf-8", "replace"))
    return None


def _refusal(error: RadixfleetError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for calls of any kind: as a stream of requests, it need not wait for one."""

    async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _counted(handler: Any, guard: Guard, caller: Caller) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler, inside the limits of its client."""

    async def answer(request: Any, context: Any) -> Any:
        try:
            with guard.visit(caller, peer_host(context.peer())):
                return await behaviour(request, context)
        except RadixfleetError as error:
            await abort_with(context, error)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with guard.visit(caller, peer_host(context.peer())):
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response
        except RadixfleetError as error:
            await abort_with(context, error)

    behaviour = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, answer),
        (True, False): (grpc.stream_unary_rpc_method_handler, answer),
        (False, True): (grpc.unary_stream_rpc_method_handler, stream),
        (True, True): (grpc.stream_stream_rpc_method_handler, stream),
    }
    make, wrapped = kinds[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: grpc.RpcMethodHandler[Any, Any] = make(wrapped, handler.request_deserializer, handler.response_serializer)
    return made


def peer_host(peer: str) -> str:
    """The host of gRPC's "ipv4:10.0.0.1:4711" or "ipv6:[::1]:4711"."""
    return peer.partition(":")[2].rpartition(":")[0] or peer

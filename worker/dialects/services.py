"""The services of other projects that this worker answers: none without the package smg-grpc-proto."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from google.protobuf import message_factory

from worker.engine.handle import EngineHandle
from worker.servicer.description import Description
from worker.servicer.inference import InferenceServicer
from worker.servicer.requests import RunningRequests
from worker.servicer.state import StateFeed

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

_SGLANG = "sglang.grpc.scheduler.SglangScheduler"

_log = structlog.get_logger(__name__)


def service_names() -> tuple[str, ...]:
    """Full names, for health and reflection."""
    return (_SGLANG,) if find_spec("smg_grpc_proto") is not None else ()


@asynccontextmanager
async def answered(
    server: grpc.aio.Server,
    description: Description,
    engine: EngineHandle,
    state: StateFeed,
    requests: RunningRequests,
    inference: InferenceServicer,
) -> AsyncIterator[None]:
    """Add the services to a server that has not started; their streams end with the block."""
    if not service_names():
        yield
        return
    from smg_grpc_proto.generated import sglang_scheduler_pb2

    from worker.dialects.kv_events import KvEventFeed
    from worker.dialects.sglang import SglangServicer

    async with KvEventFeed(engine) as events:
        servicer = SglangServicer(description, engine, state, requests, inference, events)
        add_service(server, sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"], servicer)
        _log.info("answers other gateways", services=list(service_names()))
        yield


def add_service(server: grpc.aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    """The methods of a service that `servicer` has; gRPC answers the others with UNIMPLEMENTED."""
    handlers = {method.name: _handler(method, servicer) for method in service.methods if hasattr(servicer, method.name)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _handler(method: Any, servicer: object) -> Any:
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    return make(
        getattr(servicer, method.name),
        request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
        response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
    )

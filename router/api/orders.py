"""Orders to workers, as gRPC and the console give them."""

from __future__ import annotations

import math

import grpc.aio

from radixfleet.errors import InvalidRequest
from radixfleet.v1 import worker_pb2
from router.dispatch.link import failure_of
from router.workers.registry import WorkerRegistry
from router.workers.state import WorkerState


def check_grace(grace_s: float | None) -> None:
    """Raise InvalidRequest unless `grace_s` is None or a number of seconds, 0 or more."""
    if grace_s is not None and not (math.isfinite(grace_s) and grace_s >= 0):
        raise InvalidRequest(f"grace_s must be a number of seconds, 0 or more, got {grace_s!r}", field="grace_s")


async def drain(registry: WorkerRegistry, worker: WorkerState, grace_s: float | None) -> worker_pb2.DrainResponse:
    """Drain a worker, and return when it is empty or put back to work. Raises RadixfleetError if it cannot be told."""
    try:
        return await registry.drain(worker, grace_s)
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, worker.name).error from error


async def resume(registry: WorkerRegistry, worker: WorkerState) -> None:
    """Put a drained, or draining, worker back to work. Raises RadixfleetError if it cannot be told."""
    try:
        await registry.resume(worker)
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, worker.name).error from error

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
    """Raises InvalidRequest for what is no time."""
    if grace_s is not None and not (math.isfinite(grace_s) and grace_s >= 0):
        raise InvalidRequest(f"grace_s must be a number of seconds, 0 or more, got {grace_s!r}", field="grace_s")


async def drain(registry: WorkerRegistry, worker: WorkerState, grace_s: float | None) -> worker_pb2.DrainResponse:
    """Returns when the worker is empty, or put back to work. Raises RadixfleetError where it cannot be told."""
    try:
        return await registry.drain(worker, grace_s)
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, worker.name).error from error


async def resume(registry: WorkerRegistry, worker: WorkerState) -> None:
    """The end of a drain. Raises RadixfleetError where the worker cannot be told."""
    try:
        await registry.resume(worker)
    except grpc.aio.AioRpcError as error:
        raise failure_of(error, worker.name).error from error

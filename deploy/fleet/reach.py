"""Whether a Ray head listens where it should: asked in milliseconds, where Ray itself tries for half a minute."""

from __future__ import annotations

import socket
from typing import Any

import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

_gcs: Any = gcs_service_pb2  # generated without types

REACH_S = 5.0
"""A head that does not answer for so long is not there."""

_REASONS = {
    grpc.StatusCode.UNIMPLEMENTED: "what listens at {place} is no Ray head",
    grpc.StatusCode.UNAVAILABLE: "what listens at {place} does not speak as a Ray head does",
    grpc.StatusCode.DEADLINE_EXCEEDED: "what listens at {place} has not answered as a Ray head does for {reach_s:g} s",
}
"""Any other answer, a refused token say, is one of Ray's, which then says itself what it wants."""


def reach(address: str, reach_s: float = REACH_S) -> None:
    """`address`: host:port of the head, or "auto". Raises OSError when no head answers there."""
    place = canonicalize_bootstrap_address(address)
    if place is None:  # none is known: Ray says so itself, at once
        return
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), reach_s).close()
    except OSError as error:
        raise OSError(f"nothing answers at {place} ({error.strerror or error})") from error
    with init_grpc_channel(place) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            stub.CheckAlive(_gcs.CheckAliveRequest(), timeout=reach_s)
        except grpc.RpcError as error:
            reason = _REASONS.get(error.code())
            if reason is not None:
                raise OSError(reason.format(place=place, reach_s=reach_s)) from error

"""Whether a Ray head listens where it should: asked in milliseconds, where Ray itself tries for half a minute."""

from __future__ import annotations

import logging
import socket

import grpc

from deploy.fleet.ray_inside import RayMoved, inside

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
    try:
        ray = inside()
    except RayMoved as moved:  # a command that waits longer for its refusal is better than none
        logging.getLogger(__name__).warning("%s", moved)
        return
    place = ray.resolved(address)
    if place is None:  # none is known: Ray says so itself, at once
        return
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), reach_s).close()
    except OSError as error:
        raise OSError(f"nobody listens at {place} ({error.strerror or error})") from error
    with ray.channel(place) as channel:
        try:
            ray.check_alive(channel, reach_s)
        except grpc.RpcError as error:
            reason = _REASONS.get(error.code())
            if reason is not None:
                raise OSError(reason.format(place=place, reach_s=reach_s)) from error

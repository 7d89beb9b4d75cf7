"""All that is used of Ray's inside, in one place, because Ray may move it in any version.

Ray 2.58 has no public way to ask whether a head answers: `ray.init` tries for 22 s without a setting for it, the state
API needs the dashboard, and `ray health-check` is a process that imports all of Ray. So `reach` asks what it asks.
`tests/unit/deploy/fleet/test_ray_inside.py` pins what is taken from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

AS_OTHERS = {"env_vars": {"RAY_worker_niceness": "0"}}
"""runtime_env of actors whose processes run at the priority of all others. Ray gives its workers the niceness 15: where
anything else kept the cores busy, a worker that serves said nothing for seconds, and was taken for lost."""


class RayMoved(Exception):
    """This version of Ray does not have what is used. `str(error)` says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What is used."""

    resolved: Callable[[str], str | None]
    """host:port of the head that a user's address means; None: none is known."""
    channel: Callable[[str], Any]
    """A gRPC channel to host:port with Ray's own TLS and token: a context manager."""
    check_alive: Callable[[Any, float], None]
    """Asks the head on a channel, with a timeout in s. Raises grpc.RpcError."""


def inside() -> Inside:
    """The parts. Raises RayMoved."""
    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray._private.services import canonicalize_bootstrap_address
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

        stub: Any = gcs_service_pb2_grpc.NodeInfoGcsServiceStub
        request: Any = getattr(gcs_service_pb2, "CheckAliveRequest")  # noqa: B009  generated without types
    except (ImportError, AttributeError) as error:
        from ray import __version__

        raise RayMoved(
            f"Ray {__version__} is another one inside than 2.58, with which Radixfleet is tested ({error}): "
            "whether a head answers is left to Ray, which takes up to half a minute to say no"
        ) from error

    def check_alive(channel: grpc.Channel, timeout_s: float) -> None:
        stub(channel).CheckAlive(request(), timeout=timeout_s)

    return Inside(canonicalize_bootstrap_address, init_grpc_channel, check_alive)


def draining_nodes() -> Mapping[str, int]:
    """Nodes that Ray drains, by id, each with when it will be gone, in ms since the epoch; 0: no time was told.

    Ray has been told so by `ray drain-node`, by its autoscaler, or by SIGTERM to `ray start --block`, as pods of
    Kubernetes get it. Its public list of nodes does not tell. Blocks. Raises RayMoved.
    """
    try:
        from ray._private.state import state

        ask: Callable[[], Mapping[str, int]] = state.get_draining_nodes
    except (ImportError, AttributeError) as error:
        from ray import __version__

        raise RayMoved(
            f"Ray {__version__} is another one inside than 2.58, with which Radixfleet is tested ({error}): "
            "workers on nodes that Ray drains are not moved before those are gone"
        ) from error
    return ask()

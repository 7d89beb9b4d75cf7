"""The fleet's supervisor as the `radixfleet fleet` commands reach it, from any node of the Ray cluster."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from deploy.fleet.ray_inside import AS_OTHERS
from deploy.fleet.ray_store import RayStore
from deploy.fleet.reach import reach
from deploy.fleet.spec import HEAD, NAMESPACE, SUPERVISOR
from radixfleet.errors import DeadlineExceeded, InvalidRequest, RadixfleetError, Unavailable
from radixfleet.settings import SettingsError

_ORDER_S = 120.0
"""A supervisor that is being started has much to import, on a machine that may be busy with the workers it starts."""
_RETRY_S = 0.5
_MOST_SAID = 400

Status = dict[str, Any]


class NoFleet(Unavailable):
    """The cluster is there, and runs no fleet."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Joins the Ray cluster while the block lasts. `address`: host:port of its head, or "auto": this machine's.

    What raylets have to say of their own is left out: Ray prints it to stdout, where scripts read what we say.
    Raises Unavailable.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        try:
            reach(address)
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RayError, RuntimeError, ValueError) as error:
            raise Unavailable(
                f"no Ray cluster is reached at {address}: {_said(error)}. Start one on this machine: "
                "ray start --head --resources='{\"worker_slot\": 2}'"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


class Cluster:
    """Orders and questions to the supervisor. Use inside `connected`. Blocks; not for an event loop."""

    def start_supervisor(self) -> Any:
        """Have one, if there is none yet."""
        from deploy.fleet.supervisor import Supervisor  # what it imports, orders and questions do not need

        actor = ray.remote(Supervisor).options(
            name=SUPERVISOR,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            resources={HEAD: 0.001},
            get_if_exists=True,
            runtime_env=AS_OTHERS,
        )
        return actor.remote()

    def stop_supervisor(self) -> None:
        """It must have no fleet any more."""
        RayStore().clear()
        with suppress(ValueError):
            ray.kill(ray.get_actor(SUPERVISOR, NAMESPACE), no_restart=True)

    def restart_supervisor(self) -> None:
        """A new process, which goes on from the books. Raises Unavailable."""
        ray.kill(self._supervisor(), no_restart=False)

    def status(self) -> Status:
        """See `deploy.fleet.status.describe`; with the nodes of the cluster. Raises RadixfleetError."""
        status: Status = self.order("status")
        return {**status, "nodes": [_node(node, status) for node in ray.nodes()]}

    def order(self, method: str, *arguments: object, **options: object) -> Any:
        """One call of the supervisor. Waits while it is being restarted. Raises RadixfleetError and SettingsError."""
        deadline_s = time.monotonic() + _ORDER_S
        while True:
            left_s = max(0.1, deadline_s - time.monotonic())
            try:
                return ray.get(getattr(self._supervisor(), method).remote(*arguments, **options), timeout=left_s)
            except (ActorDiedError, ActorUnavailableError) as error:  # dead for good: somebody took the fleet down
                if time.monotonic() > deadline_s:
                    raise Unavailable(f"the supervisor is being restarted: {_said(error)}") from error
                time.sleep(_RETRY_S)
            except GetTimeoutError as error:
                raise DeadlineExceeded(f"the supervisor did not answer within {_ORDER_S:.0f} s: {_why()}") from error
            except RayTaskError as error:
                if isinstance(error.cause, RadixfleetError | SettingsError):
                    raise error.cause from error
                raise
            except RayError as error:  # the head was lost meanwhile
                raise Unavailable(f"the supervisor cannot be asked: {_said(error)}") from error

    def node_id(self, name: str) -> str:
        """Of a node, by the beginning of its id or by its address. Raises InvalidRequest."""
        found = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _is_called(node, name)]
        if len(found) != 1:
            many = f"{len(found)} nodes are" if found else "no node is"
            names = ", ".join(
                f"{node['NodeID'][:12]} ({node['NodeManagerAddress']})" for node in ray.nodes() if node["Alive"]
            )
            raise InvalidRequest(f"{many} called {name!r}; there are: {names}")
        return str(found[0])

    def _supervisor(self) -> Any:
        try:
            return ray.get_actor(SUPERVISOR, NAMESPACE)
        except ValueError:
            if not RayStore().load():
                raise NoFleet("no fleet runs on this cluster; start one: radixfleet fleet apply fleet.yaml") from None
        # A fleet is in the books, so its supervisor was lost for good: another goes on.
        return self.start_supervisor()


def _is_called(node: dict[str, Any], name: str) -> bool:
    return bool(name) and (str(node["NodeID"]).startswith(name) or node["NodeManagerAddress"] == name)


def _node(node: dict[str, Any], status: Status) -> dict[str, Any]:
    members: Sequence[dict[str, Any]] = status["members"]
    draining = status.get("draining_nodes", {})  # a supervisor of an earlier version has none
    return {
        "id": node["NodeID"],
        "address": node["NodeManagerAddress"],
        "alive": node["Alive"],
        "cordoned": node["NodeID"] in status["cordoned_nodes"],
        "draining": node["NodeID"] in draining,
        "left_s": draining.get(node["NodeID"]),
        "resources": {name: value for name, value in node["Resources"].items() if not name.startswith("node:")},
        "members": [member["name"] for member in members if member["node_id"] == node["NodeID"]],
    }


def _why() -> str:
    if any(HEAD in node["Resources"] for node in ray.nodes() if node["Alive"]):
        return "look for `supervisor` in Ray's logs"
    return "the cluster has no head node"


def _said(error: BaseException) -> str:
    """What Ray says, in one line: the versions of a mismatch stand in its later ones."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]} ...").rstrip(".")

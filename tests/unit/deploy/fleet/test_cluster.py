"""Orders to the supervisor, and what Ray's actors may do to them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RaySystemError, RayTaskError
from structlog.testing import capture_logs

from deploy.fleet import cluster, ray_hosting
from deploy.fleet.cluster import Cluster, NoFleet
from deploy.fleet.ray_hosting import RayHosting
from radixfleet.errors import Unavailable


def actor(**methods: Callable[..., Any]) -> SimpleNamespace:
    """A handle whose methods are called by `.remote(...)`."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


def test_a_supervisor_that_somebody_took_down_meanwhile_is_no_fleet_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [actor(status=lambda: "a reference")]

    def get(*_: object, **__: object) -> None:
        there.clear()
        raise ActorDiedError

    def get_actor(*_: object) -> Any:
        if not there:
            raise ValueError("no such actor")
        return there[0]

    monkeypatch.setattr(cluster.ray, "get", get)
    monkeypatch.setattr(cluster.ray, "get_actor", get_actor)
    monkeypatch.setattr(cluster.RayStore, "load", lambda _: None)
    monkeypatch.setattr(cluster, "_RETRY_S", 0.0)
    with pytest.raises(NoFleet):
        Cluster().order("status")


def test_a_cluster_that_is_lost_in_the_midst_of_an_order_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: object, **__: object) -> None:
        raise RaySystemError("the GCS is gone")

    monkeypatch.setattr(cluster.ray, "get", get)
    monkeypatch.setattr(cluster.ray, "get_actor", lambda *_: actor(status=lambda: "a reference"))
    with pytest.raises(Unavailable, match="the GCS is gone"):
        Cluster().order("status")


async def test_a_member_whose_orderly_end_fails_is_killed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[object, bool]] = []

    async def end() -> None:
        raise RayTaskError("end", "a traceback", ValueError("it cannot"))

    hosting, member = RayHosting(), actor(end=end)
    hosting._handles["m-0"] = member
    monkeypatch.setattr(ray_hosting.ray, "kill", lambda handle, *, no_restart: killed.append((handle, no_restart)))
    with capture_logs() as logs:
        await hosting.end("m-0", again=False)
    assert killed == [(member, True)]
    (line,) = logs
    assert line["member"] == "m-0"
    assert "a traceback" in line["why"]


@pytest.mark.parametrize(("told", "seen"), [({}, (False, None)), ({"draining_nodes": {"n1": 57.0}}, (True, 57.0))])
def test_a_node_says_whether_ray_drains_it_unless_the_supervisor_is_an_earlier_one(
    told: dict[str, Any], seen: tuple[bool, float | None]
) -> None:
    node = {"NodeID": "n1", "NodeManagerAddress": "10.0.0.2", "Alive": True, "Resources": {}}
    found = cluster._node(node, {"members": [], "cordoned_nodes": []} | told)
    assert (found["draining"], found["left_s"]) == seen

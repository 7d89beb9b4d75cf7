"""What is used of Ray's inside: there in the version that is pinned, and told where it is not."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import get_args

import grpc
import pytest
from ray._private.state import GlobalState

from deploy.fleet.ray_inside import RayMoved, draining_nodes, inside
from deploy.fleet.reach import reach


def test_it_is_as_it_is_used() -> None:
    """Fails with a version of Ray that has moved it: then `ray_inside` is to be mended, and nothing else."""
    parts = inside()
    assert next(iter(inspect.signature(parts.resolved).parameters)) == "addr"
    assert next(iter(inspect.signature(parts.channel).parameters)) == "address"
    assert parts.resolved("10.0.0.1:6379") == "10.0.0.1:6379"
    with parts.channel("127.0.0.2:1") as channel, pytest.raises(grpc.RpcError):
        parts.check_alive(channel, 0.1)
    told = inspect.signature(GlobalState.get_draining_nodes).return_annotation
    assert get_args(told) == (str, int), "ids, and ms"


def test_a_ray_that_does_not_tell_which_nodes_it_drains_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ray._private.state.GlobalState.get_draining_nodes")
    with pytest.raises(RayMoved, match=r"workers on nodes that Ray drains are not moved"):
        draining_nodes()


def test_another_ray_is_named_and_left_to_find_its_head_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.grpc_utils", ModuleType("ray._private.grpc_utils"))
    with pytest.raises(RayMoved, match=r"Ray \d.* is another one inside than 2\.58.*init_grpc_channel"):
        inside()
    reach("10.0.0.1:6379")
    assert "half a minute" in caplog.text

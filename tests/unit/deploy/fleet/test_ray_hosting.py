"""What the supervisor hears of Ray's nodes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayError
from structlog.testing import capture_logs

from deploy.fleet.ray_hosting import RayHosting
from deploy.fleet.ray_inside import RayMoved

Tell = Callable[[Callable[[], dict[str, int]]], None]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Has Ray answer so."""
    monkeypatch.setattr("deploy.fleet.ray_hosting._GLANCE_S", 0.01)
    return lambda answer: monkeypatch.setattr("deploy.fleet.ray_hosting.draining_nodes", answer)


async def heard(hosting: RayHosting, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """One answer after the other, until one is such."""
    while not holds(found := await hosting.going()):
        pass
    return found


async def test_nodes_that_ray_drains_have_the_seconds_that_are_left(tell: Tell) -> None:
    tell(lambda: {"soon": int(time.time() * 1e3) + 30_000, "some day": 0})
    found = await heard(RayHosting(), bool)
    assert found["soon"] == pytest.approx(30.0, abs=5.0)
    assert found["some day"] == math.inf


async def test_a_head_that_does_not_answer_holds_nothing_up_and_what_it_told_last_holds(tell: Tell) -> None:
    hosting, back = RayHosting(), threading.Event()
    tell(lambda: {"n1": 0})
    await heard(hosting, bool)

    def late() -> dict[str, int]:
        back.wait(60)
        return {}

    tell(late)
    try:
        assert await hosting.going() == {"n1": math.inf}
        assert await hosting.going() == {"n1": math.inf}
    finally:
        back.set()
    assert await heard(hosting, lambda found: not found) == {}


async def test_another_ray_that_does_not_tell_is_asked_once(tell: Tell) -> None:
    asked: list[Any] = []

    def moved() -> dict[str, int]:
        asked.append(None)
        raise RayMoved("it is elsewhere")

    tell(moved)
    hosting = RayHosting()
    await heard(hosting, lambda _: bool(asked) and hosting._asking is None)
    assert await hosting.going() == {}
    assert len(asked) == 1


async def test_why_ray_does_not_tell_is_logged_when_it_is_another_reason(tell: Tell) -> None:
    """A head that is away for a minute would else be told of sixty times."""
    reasons = ["away", "away", "away", "out of memory", "", "away"]

    def fails() -> dict[str, int]:
        if reason := reasons.pop(0):
            raise RayError(reason)
        return {}

    tell(fails)
    hosting = RayHosting()
    with capture_logs() as logs:
        await heard(hosting, lambda _: not reasons and hosting._asking is None)
    assert [entry["why"] for entry in logs] == ["away", "out of memory", "away"]

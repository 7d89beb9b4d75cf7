"""How often the fleet is looked at while somebody watches it."""

from __future__ import annotations

from typing import cast

import pytest

from radixfleet.clock import ManualClock, MonotonicClock
from radixfleet.v1 import fleet_pb2
from router.api.fleet_watch import LOOK_S, LOOK_SPACING, FleetWatch
from router.api.report import Reporter
from router.workers.registry import WorkerRegistry
from router.workers.state import WorkerState


class SlowToLookAt:
    """A registry whose workers take time to look at."""

    def __init__(self, clock: ManualClock, look_s: float) -> None:
        self.num_looks = 0
        self._clock = clock
        self._look_s = look_s

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        self.num_looks += 1
        self._clock.advance(self._look_s)
        return ()


class Silent:
    """A reporter with nothing to say."""

    def fleet_state(self) -> fleet_pb2.FleetState:
        return fleet_pb2.FleetState()


async def test_a_heartbeat_does_not_wait_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a large fleet, or on a busy loop, may be rarer than what a watcher waits for."""
    monkeypatch.setattr("router.api.fleet_watch.LOOK_S", 3600.0)
    monkeypatch.setattr("router.api.fleet_watch.HEARTBEAT_S", 0.01)
    registry = SlowToLookAt(ManualClock(), 0.0)
    watch = FleetWatch(cast(WorkerRegistry, registry), cast(Reporter, Silent()), MonotonicClock())
    updates = watch.updates()
    assert (await anext(updates)).snapshot
    assert not (await anext(updates)).snapshot
    assert registry.num_looks == 1
    await updates.aclose()


@pytest.mark.parametrize(("look_s", "pause_s"), [(0.001, LOOK_S), (0.1, 0.1 * LOOK_SPACING)])
async def test_looks_that_take_long_are_rarer(look_s: float, pause_s: float) -> None:
    clock = ManualClock()
    registry = SlowToLookAt(clock, look_s)
    watch = FleetWatch(cast(WorkerRegistry, registry), cast(Reporter, Silent()), clock)

    async def come() -> int:
        """A watcher that is sent the snapshot and goes; returns how often was looked by then."""
        updates = watch.updates()
        assert (await anext(updates)).snapshot
        await updates.aclose()
        return registry.num_looks

    assert await come() == 1
    clock.advance(0.89 * pause_s)
    assert await come() == 1, "what was seen a moment ago is good enough"
    clock.advance(0.02 * pause_s)
    assert await come() == 2

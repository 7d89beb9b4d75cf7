"""The supervisor: one named, detached actor that keeps the fleet as its operator wants it.

No request passes through it. While it is away the fleet serves on, and Ray itself restarts what dies; only orders,
scaling and replacement wait until it is back, when it goes on from the books.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import ray
import structlog

from deploy.fleet.control import Control
from deploy.fleet.ray_hosting import RayHosting
from deploy.fleet.ray_store import RayStore
from radixfleet.clock import MonotonicClock
from radixfleet.lifeline import exit_with_parent
from radixfleet.telemetry import setup_logging

_PAUSE_S = 1.0
"""So that a fault that stays does not make new supervisors all the time."""

_log = structlog.get_logger("radixfleet.supervisor")


class Supervisor:
    """`Control` in an actor. The methods are its orders, and raise its errors."""

    def __init__(self) -> None:
        setup_logging()
        self._control = Control(RayHosting(), RayStore(), MonotonicClock())
        self._life = asyncio.get_running_loop().create_task(self._live(), name="control")
        self._lifeline = asyncio.get_running_loop().create_task(exit_with_parent(), name="lifeline")

    async def apply(self, text: str) -> None:
        """Want what a fleet.yaml says."""
        await self._control.apply(text)

    async def scale(self, model: str, low: int, high: int) -> None:
        """Other bounds for a model."""
        await self._control.scale(model, low, high)

    async def drain(self, names: Sequence[str], *, now: bool = False) -> None:
        """Members leave, and are replaced."""
        await self._control.drain(names, now=now)

    async def restart(self, names: Sequence[str]) -> None:
        """Members are drained and start again."""
        await self._control.restart(names)

    async def cordon(self, node_id: str, *, undo: bool) -> list[str]:
        """Empty a node, or `undo`."""
        return await self._control.cordon(node_id, undo=undo)

    async def down(self, *, drain: bool) -> None:
        """End the fleet."""
        await self._control.down(drain=drain)

    async def status(self) -> dict[str, Any]:
        """The fleet, and where this supervisor is."""
        status = await self._control.status()
        place = {"pid": os.getpid(), "node_id": ray.get_runtime_context().get_node_id()}
        return {**status, "supervisor": place}

    async def _live(self) -> None:
        """A fault ends this process: Ray makes a new supervisor, which goes on from the books."""
        try:
            await self._control.run()
        except Exception:  # noqa: BLE001  the edge of the process
            _log.exception("the control loop failed; a new supervisor will go on")
            await asyncio.sleep(_PAUSE_S)
            os._exit(1)

"""A router in an actor of Ray: `router.app` on the actor's own event loop.

The methods only read counters and set things going: what holds up the event loop holds up every stream. Requests never
come through the actor. When Ray restarts the actor, it begins anew with the first arguments, on the same ports.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import structlog

from radixfleet.address import is_wildcard
from radixfleet.garbage import settle_in
from radixfleet.lifeline import exit_with_parent
from radixfleet.membership import MemberReport, Phase
from radixfleet.settings import SettingsError, load
from radixfleet.telemetry import setup_logging
from radixfleet.tracing import setup_tracing
from router.app import Router, drain, running_router
from router.config import RouterSettings
from router.workers.gathering import GATHER_S

_ALONE_S = 10.0
"""A router without a worker for so long has none to wait for: the fleet may have none now."""

_log = structlog.get_logger("radixfleet.router")


class RouterActor:
    """Made by the supervisor, which asks for a report about every second."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """`settings`: as in a settings file."""
        self._name = name
        self._given = settings
        self._router: Router | None = None
        self._failure = ""
        self._listens_since_s = 0.0
        self._is_ready = False
        self._ending = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._node_id = ray.get_runtime_context().get_node_id()
        self._life = asyncio.get_running_loop().create_task(self._live(), name="router")
        self._lifeline = asyncio.get_running_loop().create_task(exit_with_parent(), name="lifeline")

    async def report(self, routers: Sequence[str] | None) -> MemberReport:
        """How the router is. `routers`: where all routers are; this one needs no others."""
        router = self._router
        if router is None:
            return MemberReport(self._phase(), self._failure, node_id=self._node_id, pids=(os.getpid(),))
        return MemberReport(
            self._phase(),
            self._failure,
            f"{self._host}:{router.address.rpartition(':')[2]}",
            f"{self._host}:{router.metrics_port}",
            self._node_id,
            (os.getpid(),),
            router.log.in_flight,
            queued=router.gate.waiting,
        )

    async def drain(self, grace_s: float | None) -> None:
        """Take no new calls from now on; `report` tells when the running requests have ended, or the grace (None: the
        router's setting) is over. There is no way back."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(grace_s), name="drain")

    async def end(self) -> None:
        """Stop; cuts what still runs. The actor may be killed then."""
        self._ending.set()
        await asyncio.wait([self._life])

    def _phase(self) -> Phase:
        if self._draining is not None:
            return "drained" if self._draining.done() else "draining"
        if self._failure:
            return "failed"
        if self._router is None:
            return "starting"
        self._is_ready = self._is_ready or self._has_workers(self._router)
        return "serving" if self._is_ready else "starting"

    def _has_workers(self, router: Router) -> bool:
        """It may take over: its workers have gathered, or there are none to wait for.

        The supervisor drains the fleet's next router only then, so that one of two always has all workers.
        """
        alone_s = time.monotonic() - self._listens_since_s
        eligible = any(not worker.ineligible_reason for worker in router.registry.workers)
        return alone_s >= (GATHER_S if eligible else _ALONE_S)

    async def _drain(self, grace_s: float | None) -> None:
        if self._router is not None:
            await drain(self._router, grace_s if grace_s is not None else self._grace_s)

    async def _live(self) -> None:
        try:
            settings = _settings(self._given)
            self._grace_s = settings.drain_grace_s
            self._host = ray.util.get_node_ip_address() if is_wildcard(settings.host) else settings.host
            setup_logging(settings.log_level, json=settings.log_json)
            setup_tracing("radixfleet-router")
            async with running_router(settings) as router:
                settle_in()
                self._listens_since_s = time.monotonic()
                self._router = router
                await self._ending.wait()
        except (SettingsError, OSError) as error:
            self._failure = str(error)
        except Exception as error:  # noqa: BLE001  whatever it was, the operator reads of it in the status
            _log.exception("the router failed", router=self._name)
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._router = None


def _settings(given: Mapping[str, Any]) -> RouterSettings:
    """Raises SettingsError."""
    settings = load(RouterSettings, {"host": ray.util.get_node_ip_address(), **given})
    if settings.processes > 1:
        raise SettingsError("processes: on Ray each router is one process; give the fleet more by routers.count")
    return settings

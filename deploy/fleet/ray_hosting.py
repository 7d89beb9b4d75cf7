"""Members as Ray's actors. All calls into Ray that block run in threads."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
import structlog
from ray.exceptions import ActorDiedError, RayError

from deploy.fleet.ray_inside import AS_OTHERS, RayMoved, draining_nodes
from deploy.fleet.spec import NAMESPACE, SUPERVISOR, Resources
from deploy.fleet.watch import MemberGone, MemberLost
from radixfleet.errors import InvalidRequest
from radixfleet.membership import WORKER_SLOT, MemberReport
from router.ray_actor import RouterActor
from worker.ray_actor import WorkerActor

_END_S = 20.0
"""How long an orderly end may take: an engine settles what is in flight, and is reaped."""
_TELL_S = 5.0
_GLANCE_S = 0.5
"""How long a turn of the control loop waits for what may as well come with the next."""

_log = structlog.get_logger("radixfleet.supervisor")


class RayHosting:
    """See `deploy.fleet.hosting.Hosting`. Actors have the names of their members, and Ray restarts them for ever."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._tells_draining = True
        self._draining: Mapping[str, int] = {}
        """As Ray last told."""
        self._untold = ""
        """Why it did not tell then; empty: it did."""
        self._asking: asyncio.Future[Mapping[str, int]] | None = None

    async def names(self) -> set[str]:
        """All named actors of our namespace but the supervisor."""
        actors = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        return {actor["name"] for actor in actors if actor["namespace"] == NAMESPACE} - {SUPERVISOR}

    async def start(
        self, name: str, *, router: bool, settings: Mapping[str, Any], resources: Resources, avoid: Sequence[str]
    ) -> None:
        """Returns at once, whether or not there is a place. Raises InvalidRequest for resources that Ray refuses."""
        kind: type[Any] = RouterActor if router else WorkerActor
        arguments = (name, settings) if router else (name, settings, resources.get(WORKER_SLOT, 0.0))
        try:
            actor = ray.remote(kind).options(**actor_options(name, resources, avoid))
            self._handles[name] = await asyncio.to_thread(actor.remote, *arguments)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"Ray refuses an actor with resources {dict(resources)}: {error}") from error

    async def nodes(self) -> set[str]:
        """Of the Ray cluster."""
        return {node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}

    async def going(self) -> dict[str, float]:
        """Those that Ray drains, as it last told: while the head is away, no answer comes."""
        if not self._tells_draining:
            return {}
        if self._asking is None:
            self._asking = asyncio.ensure_future(asyncio.to_thread(draining_nodes))
        await asyncio.wait([self._asking], timeout=_GLANCE_S)
        if self._asking.done():
            asked, self._asking = self._asking, None
            try:
                self._draining, self._untold = asked.result(), ""
            except (RayMoved, RayError) as error:
                if str(error) != self._untold:
                    _log.warning("nodes that Ray drains are not known", why=str(error))
                self._untold = str(error)
                self._tells_draining = not isinstance(error, RayMoved)
        now_ms = time.time() * 1e3
        return {node: (at_ms - now_ms) / 1e3 if at_ms else math.inf for node, at_ms in self._draining.items()}

    async def report(self, name: str, routers: Sequence[str] | None) -> MemberReport:
        """One actor call, which waits as long as the actor does."""
        try:
            handle = await self._handle(name)
            report: MemberReport = await handle.report.remote(routers)
        except (ActorDiedError, ValueError) as error:
            self._handles.pop(name, None)
            raise MemberGone(str(error)) from error
        except RayError as error:
            raise MemberLost(str(error)) from error
        return report

    async def drain(self, name: str) -> None:
        """Best effort: what cannot be told is asked for again when it answers."""
        with suppress(RayError, ValueError, TimeoutError):
            handle = await self._handle(name)
            async with asyncio.timeout(_TELL_S):
                await handle.drain.remote(None)

    async def end(self, name: str, *, again: bool, asks: bool = True) -> None:
        """`ray.kill` gives an actor no time for anything, so it is asked to end first; without a node none answers."""
        try:
            handle = await self._handle(name)
        except ValueError:
            return
        if asks:
            try:
                async with asyncio.timeout(_END_S):
                    await handle.end.remote()
            except (RayError, TimeoutError) as error:  # whatever it says of its end, it is killed
                _log.warning("a member did not end in order", member=name, why=str(error) or type(error).__name__)
        await asyncio.to_thread(ray.kill, handle, no_restart=not again)
        if not again:
            self._handles.pop(name, None)

    async def _handle(self, name: str) -> Any:
        """Raises ValueError when there is no such actor."""
        if name not in self._handles:
            self._handles[name] = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        return self._handles[name]


def actor_options(name: str, resources: Resources, avoid: Sequence[str]) -> dict[str, Any]:
    """Options of the actor of a member."""
    needs = dict(resources)
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": needs.pop("CPU", 0),
        "num_gpus": needs.pop("GPU", 0),
        "scheduling_strategy": "SPREAD",
        "runtime_env": AS_OTHERS,
    }
    if "memory" in needs:
        options["memory"] = needs.pop("memory")
    if avoid:
        options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoid)})"}
    return {**options, "resources": needs}

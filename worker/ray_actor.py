"""A worker in an actor of Ray: `worker.app` on the actor's own event loop, engine and runner as its child processes.

The methods only read counters and set things going, because whatever holds up the event loop holds up every stream of
the worker. Requests never come through the actor. When Ray restarts the actor, it begins anew with the first arguments.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import structlog

from radixfleet.address import is_wildcard
from radixfleet.errors import RadixfleetError
from radixfleet.lifeline import exit_with_parent
from radixfleet.membership import WORKER_SLOT, MemberReport, Phase
from radixfleet.settings import SettingsError, load
from radixfleet.telemetry import setup_logging
from radixfleet.tracing import setup_tracing
from radixfleet.types import WorkerStatus
from worker.app import Worker, make_engine, running_worker
from worker.config import WorkerSettings
from worker.engine.handle import EngineHandle, EngineLoadError
from worker.engine.process import ProcessEngine
from worker.model.errors import ModelError
from worker.model.sources import resolve_model
from worker.model.tokenizer_files import load_tokenizer_spec

_CPU_MEMORY_SHARE = 0.5
"""Of a node's memory, for all its workers together: the rest is for the system, Ray, and the processes' own needs."""
_UNREACHED_S = 10.0
"""A router that hears of a worker dials it within this time: before, that none has is no trouble."""
_FOR_PEOPLE = (EngineLoadError, ModelError, RadixfleetError, SettingsError, OSError)
_PHASES: Mapping[WorkerStatus, Phase] = {
    WorkerStatus.LOADING: "starting",
    WorkerStatus.SERVING: "serving",
    WorkerStatus.DRAINING: "draining",
    WorkerStatus.FAILED: "starting",  # its engine is restarted; it says itself when it has given up
}

_log = structlog.get_logger("radixfleet.worker")


class WorkerActor:
    """Made by the supervisor, which asks for a report about every second."""

    def __init__(self, worker_id: str, settings: Mapping[str, Any], slots: float) -> None:
        """`settings`: as in a settings file. `slots`: how many of the node's WORKER_SLOT it takes; 0: it has a GPU."""
        self._worker_id = worker_id
        self._given = settings
        self._slots = slots
        self._routers: tuple[str, ...] = ()
        self._worker: Worker | None = None
        self._engine: EngineHandle | None = None
        self._failure = ""
        self._unreached_since_s: float | None = None
        """In the event loop's time."""
        self._ending = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._node_id = ray.get_runtime_context().get_node_id()
        self._life = asyncio.get_running_loop().create_task(self._live(), name="worker")
        self._lifeline = asyncio.get_running_loop().create_task(exit_with_parent(), name="lifeline")

    async def report(self, routers: Sequence[str] | None) -> MemberReport:
        """How the worker is. `routers`: where it shall be registered from now on; None: where it is now, for a router
        is away and comes back."""
        if routers is not None:
            self._follow(tuple(routers))
        worker = self._worker
        if worker is None:
            return MemberReport(self._phase(), self._failure, node_id=self._node_id, pids=self._pids())
        last = worker.engine.last_report
        ready = worker.engine.last_ready
        address = f"{self._host}:{worker.address.rpartition(':')[2]}"
        trouble = self._failure or worker.feed.trouble or worker.registration.trouble
        if self._is_unreached(worker) and not trouble:
            trouble = f"no router has reached it at {address}"
        return MemberReport(
            self._phase(),
            trouble or "; ".join(worker.feed.advice),
            address,
            f"{self._host}:{worker.metrics_port}",
            self._node_id,
            self._pids(),
            len(worker.requests),
            load=last.load if last is not None else None,
            capacity=ready.capacity if ready is not None else None,
        )

    async def drain(self, grace_s: float | None) -> None:
        """Take no new requests from now on; `report` tells when the running ones have ended, or the grace (None: the
        worker's setting) is over. There is no way back."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(grace_s), name="drain")

    async def end(self) -> None:
        """Leave the routers and end engine and runner; cuts what still runs. The actor may be killed then."""
        self._ending.set()
        await asyncio.wait([self._life])

    def _phase(self) -> Phase:
        if self._draining is not None:
            return "drained" if self._draining.done() else "draining"
        if self._failure:
            return "failed"
        if self._worker is None:
            return "starting"
        phase = _PHASES[self._worker.feed.status]
        is_reached = self._worker.feed.was_watched  # if not, no other makes room for it
        return "starting" if phase == "serving" and not is_reached else phase

    def _is_unreached(self, worker: Worker) -> bool:
        """It has been ready for a while, and no router has come."""
        now_s = asyncio.get_running_loop().time()
        if worker.feed.status is not WorkerStatus.SERVING or worker.feed.was_watched:
            self._unreached_since_s = None
        elif self._unreached_since_s is None:
            self._unreached_since_s = now_s
        since_s = self._unreached_since_s
        return since_s is not None and now_s - since_s >= _UNREACHED_S

    def _pids(self) -> tuple[int, ...]:
        children = self._engine.child_pids if isinstance(self._engine, ProcessEngine) else ()
        return (os.getpid(), *children)

    def _follow(self, routers: tuple[str, ...]) -> None:
        is_leaving = self._draining is not None or self._ending.is_set()
        if self._worker is None or routers == self._routers or is_leaving:
            return
        if self._following is None or self._following.done():
            self._routers = routers
            self._following = asyncio.create_task(self._worker.registration.follow(routers), name="follow routers")

    async def _drain(self, grace_s: float | None) -> None:
        if self._worker is None:
            return
        grace_s = grace_s if grace_s is not None else self._grace_s
        ended = await self._worker.requests.drain(grace_s)
        _log.info("drained", worker=self._worker_id, finished_requests=ended.finished, aborted_requests=ended.aborted)

    async def _live(self) -> None:
        try:
            await self._serve()
        except _FOR_PEOPLE as error:
            self._failure = str(error)
        except Exception as error:  # noqa: BLE001  whatever it was, the operator reads of it in the status
            _log.exception("the worker failed", worker=self._worker_id)
            self._failure = f"{type(error).__name__}: {error}"
        if self._failure:
            _log.error("the worker cannot serve", worker=self._worker_id, why=self._failure)

    async def _serve(self) -> None:
        share = node_share(await asyncio.to_thread(_own_node), self._slots)
        place = {"worker_id": self._worker_id, "host": ray.util.get_node_ip_address(), "port": 0, "metrics_port": 0}
        settings = load(WorkerSettings, {**share, **place, **self._given})
        self._grace_s = settings.drain_grace_s
        self._host = ray.util.get_node_ip_address() if is_wildcard(settings.host) else settings.host
        setup_logging(settings.log_level, json=settings.log_json)
        setup_tracing("radixfleet-worker")
        path = await asyncio.to_thread(resolve_model, settings.model, lambda text: _log.info(text))
        spec = await asyncio.to_thread(load_tokenizer_spec, path)
        self._engine = make_engine(settings, path, spec)
        async with running_worker(settings, spec, self._engine) as worker:
            self._worker = worker
            try:
                await self._until_ending(worker)
            finally:
                self._ending.set()  # it leaves its routers now, and follows no others

    async def _until_ending(self, worker: Worker) -> None:
        """Raises EngineLoadError when it cannot serve, at first or after too many restarts of its engine."""
        ending = asyncio.ensure_future(self._ending.wait())
        ready = asyncio.ensure_future(worker.engine.ready())
        gave_up = asyncio.ensure_future(worker.feed.gave_up())
        try:
            await asyncio.wait((ending, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
            await asyncio.wait((ending, gave_up), return_when=asyncio.FIRST_COMPLETED)
            if gave_up.done():
                raise EngineLoadError(f"the engine cannot be kept running: {gave_up.result()}")
        finally:
            for future in (ending, ready, gave_up):
                future.cancel()
            await asyncio.gather(ending, ready, gave_up, return_exceptions=True)


def node_share(resources: Mapping[str, float], slots: float) -> dict[str, object]:
    """Settings with which the workers of a node without GPUs use it once, all together.

    `resources`: what Ray counts on the node, which in a container is the container's part.
    """
    if not slots:
        return {}
    share = slots / max(slots, resources.get(WORKER_SLOT, slots))
    settings: dict[str, object] = {}
    if "RADIXFLEET_WORKER_THREADS" not in os.environ:
        settings["threads"] = max(1, int(resources.get("CPU", 1) * share))
    if "RADIXFLEET_WORKER_DEVICE_MEMORY" not in os.environ and resources.get("memory"):
        settings["device_memory"] = int(resources["memory"] * _CPU_MEMORY_SHARE * share)
    return settings


def _own_node() -> dict[str, float]:
    node_id = ray.get_runtime_context().get_node_id()
    return next((dict(node["Resources"]) for node in ray.nodes() if node["NodeID"] == node_id), {})

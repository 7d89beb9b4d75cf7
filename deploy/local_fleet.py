"""A fleet on one machine: a router and N workers as child processes.

The router comes first and the workers register with it. The fleet is ready when the router has heard from every worker
that it serves. A child that dies later is restarted, with a pause that grows while it keeps dying. The router stops
first, and drains while the workers still serve, so that running streams end as they would have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deploy.machine import worker_share
from deploy.options import to_arguments
from deploy.processes import Child, ChildFailed, ChildSpec, write_secret
from deploy.progress import Tell
from radixfleet.answers import WorkerEntry
from radixfleet.background import beside
from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.errors import RadixfleetError
from radixfleet.os_errors import reason_of
from radixfleet.retry import RetryPolicy
from radixfleet.types import WorkerStatus

_LOGGING = ("log_level", "log_json")
_POLL_S = 0.2
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_HEALTHY_S = 60.0
_COUNT_TIMEOUT_S = 2.0
_LOOK_S = 10.0
_SILENCE_S = 30.0
"""Of a router that runs; also as long as one that is started again may take."""
_STOP_MARGIN_S = 15.0
"""Beyond its drain: an engine has 10 s to end, a server 5 s to flush."""


@dataclass(frozen=True, slots=True, repr=False)
class LocalSpec:
    """What to run. The options are those of `radixfleet router` and `radixfleet worker`, by field name.

    It has no repr: tokens may stand in it.
    """

    num_workers: int
    router_options: Mapping[str, Any]
    worker_options: Mapping[str, Any]
    """Of every worker; what is not set here is each worker's share of the machine. The router logs as they do."""
    run_dir: Path
    endpoint: Callable[[str], Endpoint] = Endpoint
    """Makes of the router's address what is dialled: with TLS and a key, where the options ask for them."""
    secrets: Mapping[Path, str] = field(default_factory=dict)
    """Files that the options name, and their text: written again where somebody has deleted them."""
    drain_grace_s: float = 30.0
    """The longest that router or workers let running requests go on once they are told to stop."""

    def router(self) -> ChildSpec:
        """The router's process."""
        logging = {name: self.worker_options.get(name) for name in _LOGGING}
        return ChildSpec("router", ("router", *to_arguments({**logging, **self.router_options})), {})

    def worker(self, index: int, router_address: str) -> ChildSpec:
        """The process of worker `index`, which registers at `router_address`."""
        share, environment = worker_share(index, self.num_workers, self.worker_options.get("device"))
        given = {name: value for name, value in self.worker_options.items() if value is not None and value != ()}
        name = f"worker-{index}"
        identity = {"worker_id": name, "routers": (router_address,), "port": 0, "metrics_port": 0}
        return ChildSpec(name, ("worker", *to_arguments({**share, **given, **identity})), environment)


class LocalFleet:
    """A running fleet, as an async context manager: ready when entered, all stopped when left."""

    def __init__(self, spec: LocalSpec, progress: Tell) -> None:
        self.endpoint = ""
        """host:port of the router."""
        self.http_endpoint = ""
        """host:port of its HTTP; empty: switched off."""
        self._spec = spec
        self._progress = progress
        self._children: dict[str, Child] = {}

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._progress(stopping_text(await self._running_requests(), self._spec.drain_grace_s))
            await self._stop()
        except asyncio.CancelledError:  # Ctrl-C again
            self._progress("cutting what still runs")
            await asyncio.gather(*(child.stop(0) for child in self.children))
            self._progress("cut what still ran\nall processes have ended")
            raise

    @property
    def target(self) -> Endpoint:
        """The router, for a Client."""
        return self._spec.endpoint(self.endpoint)

    @property
    def children(self) -> Sequence[Child]:
        """The router, then the workers."""
        return tuple(self._children.values())

    async def supervise(self) -> None:
        """Restart what dies, and tell of a router that hangs and of engines that fail; runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self._children:
                group.create_task(self._keep_alive(name))
            group.create_task(self._tell_of_silence())
            group.create_task(self._tell_of_engines())

    async def _start(self) -> None:
        self._progress("router: starting")
        router = await self._launch(self._spec.router())
        self.endpoint = await router.address()
        self.http_endpoint = await asyncio.to_thread(router.http_address)
        for index in range(self._spec.num_workers):
            await self._launch(self._spec.worker(index, self.endpoint))
        ready = asyncio.create_task(self._all_serving())
        deaths = [asyncio.create_task(child.died()) for child in self.children]
        try:
            await asyncio.wait([ready, *deaths], return_when=asyncio.FIRST_COMPLETED)
            for death in deaths:
                if death.done():
                    raise death.result()
            await ready
        finally:
            for task in (ready, *deaths):
                task.cancel()
            await asyncio.gather(ready, *deaths, return_exceptions=True)

    async def _launch(self, spec: ChildSpec) -> Child:
        for path, text in self._spec.secrets.items():
            if not await asyncio.to_thread(path.exists):
                await asyncio.to_thread(write_secret, path, text)
        child = self._children[spec.name] = await Child.start(spec, self._spec.run_dir)
        return child

    async def _all_serving(self) -> None:
        async with Client(self.target) as client:
            while True:
                with suppress(RadixfleetError):
                    workers = await client.list_workers()
                    serving = [worker for worker in workers if not worker.ineligible_reason]
                    self._progress(f"workers: {len(serving)} of {self._spec.num_workers} ready")
                    if len(serving) >= self._spec.num_workers:
                        return
                await asyncio.sleep(_POLL_S)

    async def _keep_alive(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        started_s = loop.time()
        obituary = await self._children[name].died()
        while True:
            if loop.time() - started_s > _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            self._progress(f"{obituary}\n{name}: starting again in {pause_s:.0f} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            started_s = loop.time()
            try:
                child = await self._launch(self._respawn_spec(name))
            except OSError as error:  # no memory for a process, no room for its log
                obituary = ChildFailed(f"{name}: cannot be started: {reason_of(error)}")
                continue
            async with beside(self._tell_when_back(child), f"return of {name}"):
                obituary = await child.died()

    async def _tell_of_silence(self) -> None:
        """Once, where the router runs and does not answer: a process that is stopped does not end."""
        loop = asyncio.get_running_loop()
        heard_s, is_told = loop.time(), False
        while True:
            await asyncio.sleep(_LOOK_S)
            has_answered = await self._running_requests() is not None
            if has_answered and is_told:
                self._progress(f"router: answers again\n  at {self.endpoint}")
            router = self._children["router"]
            if has_answered or router.exit_code is not None:
                heard_s, is_told = loop.time(), False
            elif loop.time() - heard_s >= _SILENCE_S and not is_told:
                is_told = True
                self._progress(
                    f"router: has said nothing for {loop.time() - heard_s:.0f} s\n"
                    f"  is its process, {router.pid}, stopped? One that is killed is started again"
                )

    async def _tell_of_engines(self) -> None:
        """Of those that die or hang within a worker that lives, which starts what died again."""
        served: dict[str, bool] = {}
        while True:
            with suppress(RadixfleetError, OSError):
                async with Client(self.target) as client:
                    async for report in client.watch_fleet():
                        for worker in report.workers:
                            self._tell_of_engine(worker, served)
            await asyncio.sleep(_POLL_S)

    def _tell_of_engine(self, worker: WorkerEntry, served: dict[str, bool]) -> None:
        """`served`: of the addresses of workers that have served, whether they did when last heard of."""
        child, address = self._children.get(worker.worker_id), worker.address
        if child is None or not worker.connected or worker.status is WorkerStatus.DRAINING:
            return
        was_serving, serves = served.get(address), worker.status is WorkerStatus.SERVING
        if serves or was_serving is not None:
            served[address] = serves
        if was_serving is True and not serves:
            self._progress(f"{child.spec.name}: its engine failed\n  {child.log_path} says why")
        elif was_serving is False and serves:
            self._progress(f"{child.spec.name}: serves again\n  at {address}")

    async def _tell_when_back(self, child: Child) -> None:
        name = child.spec.name
        try:
            address = await child.address()
            if name != "router":
                await self._until_used(name)
        except ChildFailed:
            return  # which is told as the end of the process
        except Exception as error:  # noqa: BLE001  news are not worth the end of who restarts what dies
            self._progress(f"{name}: started again\n  nobody knows whether it serves: {error}")
        else:
            self._progress(f"{name}: serves again\n  at {address}")  # of two lines: news, that stay on a terminal

    async def _until_used(self, worker_id: str) -> None:
        """The router sends it requests."""
        async with Client(self.target) as client:
            while True:
                with suppress(RadixfleetError):
                    workers = await client.list_workers()
                    if any(worker.worker_id == worker_id and not worker.ineligible_reason for worker in workers):
                        return
                await asyncio.sleep(_POLL_S)

    def _respawn_spec(self, name: str) -> ChildSpec:
        if name != "router":
            return self._children[name].spec
        spec = self._spec.router()
        # Workers and clients know the router by the address it has had so far.
        ports = ["--port", self.endpoint.rpartition(":")[2]]
        if self.http_endpoint:
            ports += ["--http-port", self.http_endpoint.rpartition(":")[2]]
        return replace(spec, arguments=(*spec.arguments, *ports))

    async def _running_requests(self) -> int | None:
        """Through the router; None where it does not say."""
        with suppress(RadixfleetError, OSError):
            async with Client(self.target, timeout_s=_COUNT_TIMEOUT_S, retry=RetryPolicy(retries=0)) as client:
                return (await client.fleet()).fleet.requests_in_flight
        return None

    async def _stop(self) -> None:
        grace_s = self._spec.drain_grace_s + _STOP_MARGIN_S
        if router := self._children.get("router"):
            await router.stop(grace_s)
        workers = [child for name, child in self._children.items() if name != "router"]
        await asyncio.gather(*(child.stop(grace_s) for child in workers))


def stopping_text(running: int | None, grace_s: float) -> str:
    """What a fleet that stops waits for; `running`: requests, None where nobody knows."""
    if running == 0:
        return "stopping"
    wait = f"up to {grace_s:g} s; Ctrl-C again cuts them"
    if running is None:
        return f"stopping: requests that run may end, {wait}"
    return f"stopping: {running} request{'s run' if running > 1 else ' runs'}, {wait}"

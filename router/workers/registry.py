"""The fleet: which workers there are, under which address and id, and which serve which model.

A worker is known by its address from the moment it is added, and by its id once it has answered. Two addresses may turn
out to be one worker (it moved, or it is reached by two names): then the first that is connected gets the requests, and
an address that nobody configured and that does not answer any more is forgotten. So is, after a while, that of a worker
that used to register again and again and does neither that nor answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

import grpc.aio
import structlog

from radixfleet.errors import InvalidRequest, Overloaded, UnknownWorker
from radixfleet.types import Capacity, ModelInfo, WorkerId
from radixfleet.v1 import fleet_pb2, worker_pb2
from router.dialects.speaker import Generator
from router.other_processes import OtherProcesses
from router.worker_address import check_worker_address
from router.workers.breaker import Breaker
from router.workers.connection import WorkerConnection
from router.workers.group import ModelGroup, model_groups
from router.workers.state import WorkerFacts, WorkerState
from router.workers.surroundings import Surroundings

MAX_ADDRESSES = 4096
"""That may be known at once: each has a connection, and a place in every choice."""
_FULL_RETRY_S = 60.0
_IDLE_POLL_S = 0.2
_NAMED = 20
"""Workers that an error lists."""
_NOBODY = ModelGroup()

_log = structlog.get_logger("radixfleet.router.workers")


class _Kind(NamedTuple):
    """What of a worker's facts groups are made by."""

    worker_id: WorkerId
    model: ModelInfo
    dialect: str
    capacity: Capacity | None


def _kind(facts: WorkerFacts) -> _Kind:
    return _Kind(facts.worker_id, facts.model, facts.dialect, facts.capacity)


class WorkerRegistry:
    """All workers, in the order in which they were added. On the event loop only."""

    def __init__(
        self,
        around: Surroundings,
        on_change: Callable[[], None],
        on_load: Callable[[], None],
        other_processes: OtherProcesses | None = None,
    ) -> None:
        """`on_change` is called when a worker came, went, or has another status, `on_load` when its load is another.

        `other_processes`: router processes that must hear of orders too; None: there are none.
        """
        self.other_processes = other_processes or OtherProcesses()
        self._around = around
        self._on_change = on_change
        self._on_load = on_load
        self._connections: dict[str, WorkerConnection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._configured = frozenset(around.settings.workers)
        self._leaving: set[asyncio.Task[None]] = set()
        self._kinds: dict[str, _Kind] = {}
        """What each worker that has answered is, by address."""
        self._groups: dict[str, ModelGroup] | None = None
        self._models: tuple[str, ...] = ()

    def start(self) -> None:
        """Dial the configured workers."""
        for address in self._around.settings.workers:
            self.add(address)

    async def close(self) -> None:
        """Leave all workers alone; what still runs on their channels breaks off."""
        while self._connections:  # one may be removed, or come, meanwhile
            address = next(iter(self._connections))
            connection = self._connections.pop(address)
            await _cancelled(self._tasks.pop(address))
            await connection.close()
        for task in tuple(self._leaving):
            await _cancelled(task)

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """Every worker."""
        return tuple(connection.state for connection in self._connections.values())

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that known workers serve, in order."""
        self._by_model()
        return self._models

    def group(self, model: str) -> ModelGroup:
        """The workers of this model."""
        return self._by_model().get(model, _NOBODY)

    def get(self, name: str) -> WorkerState:
        """The worker with this id, or at this address. Raises UnknownWorker."""
        named = [worker for worker in self.workers if name and name in (worker.worker_id, worker.address)]
        if not named:
            names = [worker.name for worker in self.workers[:_NAMED]] + ["..."] * (len(self.workers) > _NAMED)
            raise UnknownWorker(f"no worker is called {name!r}; known are {', '.join(names) or 'none'}")
        return min(named, key=lambda worker: bool(worker.duplicate_of))

    def channel(self, worker: WorkerState) -> grpc.aio.Channel:
        """The channel to a worker that is in the registry."""
        channel = self._connections[worker.address].channel
        assert channel is not None, "engines that are reached by HTTP have generators"
        return channel

    def generator(self, worker: WorkerState) -> Generator | None:
        """The way of requests to a worker in the registry that speaks another dialect; None for our own."""
        return self._connections[worker.address].generator

    def add(self, address: str, *, repeats: bool = False) -> bool:
        """Dial a worker, and go on dialling. False: it was known already.

        `repeats`: it registers again and again, and is forgotten when it did not for long.
        Raises InvalidRequest for a bad address, Overloaded for one too many.
        """
        _check(address)
        is_configured = address in self._configured
        repeats = repeats and not is_configured
        known = self._connections.get(address)
        if known is not None:
            if repeats:
                known.renew()
            return False
        if len(self._connections) >= MAX_ADDRESSES and not is_configured:
            raise Overloaded(
                f"{MAX_ADDRESSES} addresses of workers are known here, and no more may be: remove those that are gone "
                "(radixfleet workers remove)",
                retry_after_s=_FULL_RETRY_S,
            )
        settings = self._around.settings
        breaker = Breaker(failures=settings.breaker_failures, open_s=settings.breaker_open_s, clock=self._around.clock)
        slot = self._around.sketch.attach()
        state = WorkerState(address, slot, self._around.sketch, breaker, self._around.clock, self._on_load)
        connection = WorkerConnection(state, self._around, lambda: self._changed(state))
        if repeats:
            connection.renew()
        self._connections[address] = connection
        self._tasks[address] = asyncio.create_task(self._follow(connection), name=f"follow {address}")
        _log.info("worker added", address=address)
        self._changed(state)
        return True

    def learn(self, addresses: Iterable[str]) -> None:
        """Dial the workers that the other processes know, as many as may be."""
        for address in addresses:
            try:
                self.add(address)
            except Overloaded as error:
                _log.warning("not all workers that the other processes know are known here", reason=str(error))
                return

    def remove(self, worker: WorkerState) -> None:
        """Forget a worker. Its channel closes when the requests that run on it have ended."""
        connection = self._connections.pop(worker.address)
        worker.removed = True
        self._tasks.pop(worker.address).cancel()
        self._around.listener.worker_gone(worker)
        self._around.sketch.detach(worker.slot)
        leaving = asyncio.create_task(_close_when_idle(connection), name=f"leave {worker.address}")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        _log.info("worker removed", worker=worker.name, address=worker.address)
        self._changed(worker)

    async def drain(self, worker: WorkerState, grace_s: float | None) -> worker_pb2.DrainResponse:
        """No new requests for it from this turn on; returns when it is empty.

        Raises AioRpcError when it cannot be told, Unavailable when it is removed meanwhile.
        """
        worker.drain_wanted = True
        worker.changed()
        self._changed(worker)
        _log.info("draining worker", worker=worker.name, grace_s=grace_s)
        return await self._connections[worker.address].drain(grace_s)

    async def resume(self, worker: WorkerState) -> None:
        """Put a drained, or draining, worker back to work. Raises AioRpcError or Unavailable when it cannot be told."""
        await self._connections[worker.address].resume()
        self.resumed(worker)
        await self.other_processes.tell("Resume", fleet_pb2.ResumeWorkerRequest(worker_id=worker.worker_id))

    def resumed(self, worker: WorkerState) -> None:
        """It was told that its drain is over, by this process or another."""
        worker.drain_wanted = False
        worker.changed()
        self._changed(worker)
        _log.info("worker resumed", worker=worker.name)

    def _by_model(self) -> dict[str, ModelGroup]:
        if self._groups is None:
            self._groups = model_groups(self.workers)
            self._models = tuple(sorted(self._groups))
        return self._groups

    async def _follow(self, connection: WorkerConnection) -> None:
        await connection.run()
        worker = connection.state
        _log.info("worker is gone and does not register any more", worker=worker.name, address=worker.address)
        await self.other_processes.tell("Remove", fleet_pb2.RemoveRequest(worker_id=worker.address))
        if not worker.removed:
            self.remove(worker)

    def _changed(self, worker: WorkerState) -> None:
        """It came, went, or has another status. In a large fleet that is often, and a new group takes milliseconds."""
        current = self._connections.get(worker.address)
        if current is not None and current.state is not worker:
            return  # it was removed, and another was added at its address
        facts, was = worker.facts, self._kinds.get(worker.address)
        is_known = facts is not None and not worker.removed
        kind = None if facts is None or not is_known else _kind(facts)
        if kind != was:
            self._regroup(worker.address, kind)
        for worker_id in {each.worker_id for each in (kind, was) if each is not None and each.worker_id}:
            self._settle_duplicates(worker_id)
        self._on_change()

    def _regroup(self, address: str, kind: _Kind | None) -> None:
        if kind is None:
            del self._kinds[address]
        else:
            self._kinds[address] = kind
        self._groups = None
        self._around.tokenizers.keep_only({each.model.tokenizer_fingerprint for each in self._kinds.values()})

    def _settle_duplicates(self, worker_id: WorkerId) -> None:
        """Decide which of several workers with this id counts."""
        addresses = {address for address, kind in self._kinds.items() if kind.worker_id == worker_id}
        same = [connection.state for address, connection in self._connections.items() if address in addresses]
        owner = next((worker for worker in same if worker.connected), None)
        for worker in same:
            duplicate_of = "" if owner is None or owner is worker else owner.address
            if duplicate_of and worker.was_lost and worker.address not in self._configured:
                _log.info("worker moved", worker=worker.name, address=duplicate_of, was=worker.address)
                self.remove(worker)
                return
            if duplicate_of != worker.duplicate_of:
                worker.duplicate_of = duplicate_of
                worker.changed()


def _check(address: str) -> None:
    """Raises InvalidRequest."""
    try:
        check_worker_address(address)
    except ValueError as error:
        raise InvalidRequest(f"address {error}", field="address") from error


async def _close_when_idle(connection: WorkerConnection) -> None:
    try:
        while connection.state.books.own_requests:  # noqa: ASYNC110  rare, and books know nothing of events
            await asyncio.sleep(_IDLE_POLL_S)
    finally:
        await connection.close()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])

"""The fleet's control loop: sees, decides, acts, about once a second. Knows nothing of Ray: see `Hosting`.

Everything runs on one event loop. Orders (apply, scale, drain, restart, down) only change the books; the loop does the
rest, so an order that was given is carried out whatever happens to the supervisor afterwards.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import structlog

from deploy.fleet import status
from deploy.fleet.books import Books, Record, Store, load_books, save_books
from deploy.fleet.hosting import Hosting
from deploy.fleet.reconcile import LONGEST_WAIT_S, PATIENCE_S, Action, Drain, Member, Remove, Restart, Start, reconcile
from deploy.fleet.scaling import Limits, Scaling, WorkerLoad
from deploy.fleet.spec import MAX_WORKERS, ROUTER_GROUP, FleetSpec, parse_spec
from deploy.fleet.watch import Watch
from radixfleet.clock import Clock
from radixfleet.errors import InvalidRequest, UnknownWorker
from radixfleet.membership import MemberReport
from radixfleet.settings import SettingsError

PERIOD_S = 1.0
_FIRST_SIGHT_S = 5.0
"""A member that has a place answers within this time."""

_log = structlog.get_logger("radixfleet.supervisor")


class Control:
    """Use `run` once; the other methods are orders and questions."""

    def __init__(self, hosting: Hosting, store: Store, clock: Clock, period_s: float = PERIOD_S) -> None:
        self._hosting = hosting
        self._store = store
        self._clock = clock
        self._period_s = period_s
        self._books = Books()
        self._spec: FleetSpec | None = None
        self._trouble = ""
        """Why the fleet is left as it is; empty: it is not."""
        self._saving = asyncio.Lock()
        self._scaling: dict[str, Scaling] = {}
        self._watches: dict[str, Watch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Watching."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._going: dict[str, float] = {}
        """Nodes that are taken away, each with the seconds that were left at the last turn."""
        self._changed = asyncio.Event()
        self._loaded = asyncio.Event()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All that runs beside `run`: cancel them when it has been cancelled."""
        return [*self._tasks.values(), *self._ending.values()]

    # The loop.

    async def run(self) -> None:
        """Until cancelled."""
        self._books = await asyncio.to_thread(load_books, self._store)
        self._read_spec()
        self._scaling = {model: Scaling(count) for model, count in self._books.counts.items()}
        for name in self._books.members:
            self._follow(self._new_watch(name))
        for name in await self._hosting.names() - self._books.members.keys():
            _log.warning("ending a member that nobody wanted", member=name)
            await self._hosting.end(name, again=False)
        await self._first_sight()
        self._loaded.set()
        while True:
            self._changed.clear()
            await self._turn()
            try:
                async with asyncio.timeout(self._period_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _read_spec(self) -> None:
        """An earlier version may have taken what this one refuses: then nothing is touched until an order comes."""
        try:
            self._spec = self._books.spec()
        except SettingsError as error:
            self._trouble = f"the fleet is left as it is, for its file is refused; apply another: {error}"
            _log.error("the file in the books is refused", why=str(error))

    async def _first_sight(self) -> None:
        """Members that an earlier supervisor made are not taken for new ones: hear first how they are."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_SIGHT_S):
                for watch in self._watches.values():
                    await watch.seen.wait()

    async def _turn(self) -> None:
        await self._note_places()
        if self._trouble:
            return
        self._scale_by_load()
        self._going = await self._hosting.going()
        await self._leave_closed()
        for action in reconcile(self._books.wanted(self._spec, self._hurried()), self._members()):
            if self._changed.is_set():  # an order, after which much may look different
                return
            _log.info("action", what=type(action).__name__.lower(), member=action.name, why=getattr(action, "why", ""))
            await self._take(action)

    async def _note_places(self) -> None:
        """So that a later supervisor does not take who is silent for one that waits for a place."""
        moved = False
        for name, record in self._books.members.items():
            report = self._watches[name].report
            if report is not None and report.node_id != record.node_id:
                record.node_id, moved = report.node_id, True
        if moved:
            await self._save()

    def _closed(self) -> set[str]:
        """Nodes on which no worker shall be: an operator or the node's owner said so."""
        return self._books.cordoned | self._going.keys()

    async def _leave_closed(self) -> None:
        """Ray starts an actor that died where it likes, so also on a node that is being emptied.

        The last of a model waits there for its successor (see `_hurried`), at the longest until PATIENCE_S are left, in
        which what runs can end.
        """
        members = self._books.members
        leaving = {name for name in members if self._is_worker_on(name, self._closed())}
        soon = {node for node, left_s in self._going.items() if left_s <= PATIENCE_S}
        unheld = {name for name in leaving if self._is_worker_on(name, soon)}
        if leaving - self._books.leaving or unheld - self._books.unheld:
            self._books.leaving |= leaving
            self._books.unheld |= unheld
            await self._save()

    def _hurried(self) -> dict[str, float]:
        """Who leaves a node that is being emptied, each with how long it may wait for a successor.

        Where it is known when the node goes, that sets an end (see `_leave_closed`); else it may be soon.
        """
        timed = {node for node, left_s in self._going.items() if left_s < math.inf} - self._books.cordoned
        leaving = [name for name in self._books.leaving if self._is_worker_on(name, self._closed())]
        return {name: LONGEST_WAIT_S if self._is_worker_on(name, timed) else PATIENCE_S for name in leaving}

    def _members(self) -> list[Member]:
        return [
            self._watches[name].member(record.group, record.revision, busy=name in self._ending)
            for name, record in self._books.members.items()
        ]

    async def _take(self, action: Action) -> None:
        match action:
            case Start(name, group):
                await self._start(name, group)
            case Drain(name):
                if name not in self._books.restarting:
                    self._books.leaving.add(name)
                    await self._save()
                await self._hosting.drain(name)
            case Remove(name):
                self._ending[name] = asyncio.create_task(self._remove(name), name=f"remove {name}")
            case Restart(name):
                self._ending[name] = asyncio.create_task(self._restart(name), name=f"restart {name}")

    async def _start(self, name: str, group: str) -> None:
        if self._spec is None:  # the fleet goes down
            return
        router = group == ROUTER_GROUP
        index = int(name.rpartition("-")[2])
        settings = self._spec.router_settings(index) if router else self._spec.worker_settings(group)
        resources = self._spec.routers.resources if router else self._spec.models[group].needs
        self._books.members[name] = Record(group, self._spec.revision(group))
        watch = self._new_watch(name)
        await self._save()
        avoid = sorted(self._closed())
        try:
            await self._hosting.start(name, router=router, settings=settings, resources=resources, avoid=avoid)
        except InvalidRequest as error:  # whoever asks for it hears that it is gone; one made anew may be possible
            _log.error("no such member can be", member=name, why=str(error))
            watch.failure = str(error)
        self._follow(watch)

    async def _remove(self, name: str) -> None:
        try:
            await self._hosting.end(name, again=False, asks=not self._waits(name))
            self._tasks.pop(name).cancel()
            del self._watches[name]
            self._books.forget(name)
            await self._save()
        finally:
            del self._ending[name]
            self._changed.set()

    async def _restart(self, name: str) -> None:
        try:
            await self._hosting.end(name, again=True)
            self._books.restarting.discard(name)
            self._books.members[name].node_id = ""
            last = self._watches[name]
            self._tasks.pop(name).cancel()
            watch = self._new_watch(name, former=last.report)
            watch.failures, watch.failure = last.failures, last.failure
            self._follow(watch)
            await self._save()
        finally:
            del self._ending[name]
            self._changed.set()

    def _new_watch(self, name: str, former: MemberReport | None = None) -> Watch:
        watch = Watch(
            name,
            lambda: self._hosting.report(name, self.router_addresses()),
            self._clock,
            self._period_s,
            had_place=bool(self._books.members[name].node_id),
            former=former,
        )
        self._watches[name] = watch
        return watch

    def _follow(self, watch: Watch) -> None:
        self._tasks[watch.name] = asyncio.create_task(watch.follow(), name=f"watch {watch.name}")

    def router_addresses(self) -> list[str] | None:
        """Where the routers are; None while that of one is not known, so that no worker leaves it for that reason."""
        addresses = []
        for name, record in self._books.members.items():
            if record.group == ROUTER_GROUP:
                report = self._watches[name].report
                if report is None or not report.address:
                    return None
                addresses.append(report.address)
        return addresses

    async def _save(self) -> None:
        async with self._saving:  # what is written last is what was true last
            await asyncio.to_thread(save_books, self._store, self._books)

    # Scaling.

    def _scale_by_load(self) -> None:
        if self._spec is None:
            return
        queued = self.queued()
        for model, parts in self._spec.models.items():
            low, high = self._books.bounds[model]
            limits = Limits(low, high, parts.scaling.up_after_s, parts.scaling.down_after_s)
            count = self._scaling[model].decide(self._clock.now(), limits, queued.get(model, 0), self._loads(model))
            if count != self._books.counts[model]:
                _log.info("scaling", model=model, workers=count, before=self._books.counts[model])
                self._books.counts[model] = count

    def queued(self) -> dict[str, int]:
        """Requests that wait in routers, by model."""
        total: dict[str, int] = {}
        for name, record in self._books.members.items():
            report = self._watches[name].report
            if record.group == ROUTER_GROUP and report is not None:
                for model, number in report.queued.items():
                    total[model] = total.get(model, 0) + number
        return total

    def _loads(self, model: str) -> list[WorkerLoad]:
        loads = []
        for name, record in self._books.members.items():
            watch = self._watches[name]
            report = watch.report
            if record.group != model or watch.phase() != "serving" or report is None or name in self._ending:
                continue
            if report.load is None or report.capacity is None:
                continue
            loads.append(
                WorkerLoad(
                    report.load.running_requests,
                    report.load.waiting_requests,
                    report.capacity.max_running_requests,
                    report.load.kv_protected_tokens / max(1, report.capacity.kv_tokens),
                )
            )
        return loads

    # Orders.

    async def apply(self, text: str) -> None:
        """Want what a fleet.yaml says. Raises SettingsError."""
        await self._loaded.wait()
        spec = parse_spec(text)
        self._spec, self._trouble = spec, ""
        books = self._books
        books.spec_text = text
        books.bounds = {model: (parts.workers.min, parts.workers.max) for model, parts in spec.models.items()}
        books.counts = {
            model: min(max(books.counts.get(model, 0), low), high) for model, (low, high) in books.bounds.items()
        }
        self._scaling = {model: Scaling(count) for model, count in books.counts.items()}
        await self._ordered()

    async def scale(self, model: str, low: int, high: int) -> None:
        """Other bounds for a model, until the next `apply`. Raises InvalidRequest."""
        await self._loaded.wait()
        if model not in self._books.bounds:
            raise InvalidRequest(f"no model is called {model!r}: there are {', '.join(self._books.bounds) or 'none'}")
        if not 0 <= low <= high or (high and not low):
            raise InvalidRequest(f"must be a number of workers, or 1 <= min <= max; got {low} and {high}")
        if high > MAX_WORKERS:
            raise InvalidRequest(f"a model has at most {MAX_WORKERS:,} workers; got {high:,}")
        self._books.bounds[model] = (low, high)
        self._books.counts[model] = min(max(self._books.counts[model], low), high)
        await self._ordered()

    async def drain(self, names: Sequence[str], *, now: bool = False) -> None:
        """Members leave for good; the fleet replaces them. Raises UnknownWorker.

        `now`: also the last that serves a model, before another does.
        """
        await self._known(names)
        self._books.leaving.update(names)
        if now:
            self._books.unheld.update(names)
        await self._ordered()

    async def restart(self, names: Sequence[str]) -> None:
        """Members are drained and start again. Raises UnknownWorker."""
        await self._known(names)
        self._books.restarting.update(names)
        await self._ordered()

    async def cordon(self, node_id: str, *, undo: bool) -> list[str]:
        """Nothing starts on a node any more, and the workers there leave; or `undo`. Returns who leaves."""
        await self._loaded.wait()
        if undo:
            self._books.cordoned.discard(node_id)
            names = []
        else:
            # Those that have left do not come back under their ids, and would be avoided for ever.
            there = await self._hosting.nodes()
            self._books.cordoned = {*(self._books.cordoned & there), node_id}
            names = [name for name in self._books.members if self._is_worker_on(name, {node_id})]
        # Who waits for a place was told which nodes to avoid when it was made, so it is made anew.
        self._books.leaving.update(names, filter(self._is_waiting_worker, self._books.members))
        await self._ordered()
        return names

    async def down(self, *, drain: bool) -> None:
        """Want no fleet: workers leave, then routers. Without `drain` all at once."""
        await self._loaded.wait()
        self._books.spec_text = ""
        self._spec, self._trouble = None, ""
        self._books.bounds, self._books.counts, self._books.cordoned = {}, {}, set()
        if not drain:  # begun before the next turn, which would drain them
            for name in self._tasks.keys() - self._ending.keys():  # one that is being made ends in the next turn
                await self._take(Remove(name, "the fleet is taken down at once"))
        await self._ordered()

    async def status(self) -> dict[str, Any]:
        """For people and programs: see `deploy.fleet.status`."""
        await self._loaded.wait()
        seen = status.describe(self._books, self._watches, self._spec, self.queued(), self._going)
        return {**seen, "trouble": self._trouble}

    def _is_worker_on(self, name: str, node_ids: set[str]) -> bool:
        record, report = self._books.members[name], self._watches[name].report
        node_id = report.node_id if report is not None else record.node_id
        return record.group != ROUTER_GROUP and node_id in node_ids

    def _waits(self, name: str) -> bool:
        """It has no place."""
        return self._watches[name].phase() == "pending"

    def _is_waiting_worker(self, name: str) -> bool:
        return self._books.members[name].group != ROUTER_GROUP and self._waits(name)

    async def _known(self, names: Sequence[str]) -> None:
        await self._loaded.wait()
        unknown = [name for name in names if name not in self._books.members]
        if unknown:
            known = ", ".join(sorted(self._books.members)) or "none"
            raise UnknownWorker(f"no member is called {unknown[0]!r}; there are: {known}")

    async def _ordered(self) -> None:
        self._changed.set()  # what was decided before is not begun any more
        await self._save()

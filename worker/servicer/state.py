"""What a worker says about itself: status, load, cached prefixes and leased requests, as one stream for each watcher.

The engine reports every 50 ms; this folds the reports into updates, one about every 100 ms while anything changes and
at least one a second, and numbers the changes of the prefixes. Where there are several watchers, what one of them has
sent is news to the others: a new request is told of within `PROMPT_S`, with the load that the front itself knows. All
watchers get the same updates, so each of them sees the numbers without a gap; one that comes late, falls behind, or
sees a new incarnation gets a digest instead.

    engine --Report, StateChange------> StateFeed --StateUpdate--> Watcher, Watcher, ...   (routers)
    requests --prompts, LeaseEvent-------^   `--status--> health, metrics
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

import structlog

from radixfleet import convert
from radixfleet.types import HashArray, Load, WorkerStatus
from radixfleet.v1 import worker_pb2
from worker.core.messages import Report
from worker.engine.handle import EngineHandle, Notice, StateChange
from worker.metrics import WorkerMetrics
from worker.servicer.acceptance import PROMPT_S, Acceptance, AcceptedRequest
from worker.servicer.prefixes import PrefixMirror
from worker.servicer.prompts import ComingPrompts
from worker.servicer.totals import TotalsKeeper

UPDATE_S = 0.1
HEARTBEAT_S = 1.0
_MAX_UNREAD = 64
_MAX_UNREAD_LEASES = 10_000

_log = structlog.get_logger(__name__)


class Watcher(AsyncIterator[worker_pb2.StateUpdate]):
    """One watcher's place in the stream. Holds a bounded number of updates that were not read yet."""

    def __init__(self, digest: worker_pb2.StateUpdate) -> None:
        self._unread = deque([digest])
        self._arrived = asyncio.Event()
        self._ended = False

    @property
    def behind(self) -> bool:
        """Too many updates wait: `restart` it instead of adding another."""
        return len(self._unread) >= _MAX_UNREAD

    def put(self, update: worker_pb2.StateUpdate) -> None:
        """Add the next update."""
        self._unread.append(update)
        self._arrived.set()

    def restart(self, digest: worker_pb2.StateUpdate) -> None:
        """Replace what is unread by a digest; what became of leased requests is kept."""
        leases = [event for update in (*self._unread, digest) for event in update.lease_events]
        self._unread.clear()
        digest.ClearField("lease_events")
        digest.lease_events.extend(leases[-_MAX_UNREAD_LEASES:])
        self.put(digest)

    def end(self) -> None:
        """No more updates come; those unread are still given out."""
        self._ended = True
        self._arrived.set()

    async def __anext__(self) -> worker_pb2.StateUpdate:
        """Wait for the next update."""
        while not self._unread:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._unread.popleft()


class StateFeed:
    """The worker's state, and those who watch it: their streams end when the block that this manages is left."""

    def __init__(
        self,
        engine: EngineHandle,
        metrics: WorkerMetrics,
        *,
        update_s: float = UPDATE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._update_s = update_s
        self._heartbeat_s = heartbeat_s
        self._draining = False
        self._status = self._current_status()
        self._incarnation = engine.incarnation
        self._forget_prefixes()
        self._totals = TotalsKeeper()
        self._lease_events: list[worker_pb2.LeaseEvent] = []
        self._watchers: set[Watcher] = set()
        self._changed = asyncio.Event()
        self._has_report = False
        """The engine has reported since the last update."""
        self._urgent = asyncio.Event()
        """A new request is to be told of."""
        self._status_changed = asyncio.Event()
        """Set, and replaced, at each change."""
        self.was_watched = False
        """A router has reached the worker, now or earlier: one that is away for a moment comes back to it."""
        self.trouble = ""
        """Why the engine has failed, in words; empty: it has not."""
        self._gave_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self._unsubscribe = self._engine.subscribe(self._on_notice)
        self._ticker = asyncio.create_task(self._tick(), name="state updates")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._unsubscribe()
        for watcher in self._watchers:
            watcher.end()
        self._ticker.cancel()
        with suppress(asyncio.CancelledError):
            await self._ticker

    @property
    def status(self) -> WorkerStatus:
        """The engine's status; DRAINING when it serves but takes no new requests."""
        return self._status

    async def status_after(self, seen: WorkerStatus) -> WorkerStatus:
        """Wait until the status is another than `seen`; returns it."""
        while self._status is seen:
            await self._status_changed.wait()
        return self._status

    async def gave_up(self) -> str:
        """Wait until the engine has failed and will not be started again; returns why."""
        return await asyncio.shield(self._gave_up)

    @property
    def advice(self) -> list[str]:
        """What the operator should change, while memory is short."""
        report = self._engine.last_report
        return list(report.advice.values()) if report is not None else []

    def drain(self) -> None:
        """The worker takes no new requests from now on."""
        self._draining = True
        self._update_status()

    def resume(self) -> None:
        """The worker takes requests again."""
        self._draining = False
        self._update_status()

    def accepted(self, block_hashes: Callable[[], HashArray], prompt_tokens: int) -> AcceptedRequest:
        """A request was submitted: tell what is coming. Whoever answers it tells what it returns how far it is.

        `block_hashes`: of its prompt. A single watcher has sent it itself, and is not told.
        """
        if self._is_shared:
            self._changed.set()
            self._urgent.set()
        return self._acceptance.accept(block_hashes, prompt_tokens, is_told=self._is_shared)

    def lease_event(self, event: worker_pb2.LeaseEvent) -> None:
        """Tell the watchers what became of a leased request."""
        self._lease_events.append(event)
        self._changed.set()

    def first_token(self, ttft_s: float) -> None:
        """A request has its first token, `ttft_s` after it came."""
        self._totals.first_token(ttft_s)
        self._changed.set()

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A watcher, from now on until the block is left. Its first update is a digest, with all that is coming."""
        if self._acceptance.tell():
            self._publish()
        watcher = Watcher(self._digest())
        self._watchers.add(watcher)
        self.was_watched = True
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, StateChange):
            self._on_state_change(notice)
        else:
            self._on_report(notice)

    def _on_state_change(self, change: StateChange) -> None:
        self.trouble = change.message if change.status is WorkerStatus.FAILED else ""
        if change.status is WorkerStatus.FAILED:
            _log.error("the engine does not serve", reason=change.message, final=change.final)
            if change.final and not self._gave_up.done():
                self._gave_up.set_result(change.message)
        ready = self._engine.last_ready
        if change.status is WorkerStatus.SERVING and ready is not None:
            self._metrics.engine_started(ready.capacity, ready.memory)
        restarted = change.incarnation != self._incarnation
        if restarted:
            self._metrics.engine_lost()
            self._incarnation = change.incarnation
            self._forget_prefixes()
            self._has_report = False
            self._totals.restart()
        self._update_status(restarted=restarted)

    def _on_report(self, report: Report) -> None:
        self._metrics.report(report.load, report.counters, report.step_s, report.bubble_s)
        self._metrics.evicted(len(report.evicted_blocks))
        self._metrics.memory(report.step_limits, report.advice)
        self._prefixes.apply(report.evicted_blocks, report.added_blocks)
        self._prompts.reported()
        self._has_report = True
        self._changed.set()

    @property
    def _is_shared(self) -> bool:
        """Watchers do not know all requests by themselves."""
        return len(self._watchers) > 1

    def _forget_prefixes(self) -> None:
        self._prefixes = PrefixMirror()
        self._prompts = ComingPrompts(self._prefixes.blocks)
        self._acceptance = Acceptance(self._prompts)

    def _current_status(self) -> WorkerStatus:
        status = self._engine.status
        return WorkerStatus.DRAINING if self._draining and status is not WorkerStatus.FAILED else status

    def _update_status(self, *, restarted: bool = False) -> None:
        """Take over the engine's status. Neither its change nor a new incarnation waits for the next update."""
        status = self._current_status()
        changed = status is not self._status
        self._status = status
        if restarted:
            for watcher in self._watchers:
                watcher.restart(self._digest())
        elif changed:
            self._publish()
        if changed:
            self._metrics.status_changed(status)
            self._status_changed.set()
            self._status_changed = asyncio.Event()

    async def _tick(self) -> None:
        """Publish what has changed, every `update_s`, new requests at once; without a change, a heartbeat."""
        prompt_s = min(PROMPT_S, self._update_s)
        while True:
            await _set_within(self._changed, self._heartbeat_s)
            self._publish()
            await asyncio.sleep(prompt_s)
            await _set_within(self._urgent, self._update_s - prompt_s)

    def _publish(self) -> None:
        """Send every watcher what has changed since the last update."""
        self._changed.clear()
        self._urgent.clear()
        update = self._update()
        for watcher in self._watchers:
            if watcher.behind:
                watcher.restart(self._digest(update.lease_events))
            else:
                watcher.put(update)

    def _update(self) -> worker_pb2.StateUpdate:
        """The state now, with the changes of the prefixes and the lease events since the last update."""
        change = self._prefixes.commit()
        prompts = self._prompts.commit(change)
        update = self._state()
        update.between_reports, self._has_report = not self._has_report, False
        update.coming, update.gone = prompts.coming, prompts.gone
        if change is not None:
            update.delta.evicted, update.delta.added = change.evicted, change.added
        update.lease_events.extend(self._lease_events)
        self._lease_events.clear()
        return update

    def _digest(self, lease_events: Iterable[worker_pb2.LeaseEvent] = ()) -> worker_pb2.StateUpdate:
        """The state now, with all prefixes as of the last update: whole, so `between_reports` does not matter here."""
        update = self._state()
        update.digest.block_hashes = self._prefixes.digest()
        update.coming = self._prompts.whole()
        update.lease_events.extend(lease_events)
        return update

    def _state(self) -> worker_pb2.StateUpdate:
        report, ready, accepted = self._engine.last_report, self._engine.last_ready, self._acceptance.load
        return worker_pb2.StateUpdate(
            incarnation=self._incarnation,
            sequence=self._prefixes.sequence,
            status=convert.worker_status_to_pb(self._status),
            load=convert.load_to_pb(report.load if report is not None else Load()),
            capacity=convert.capacity_to_pb(ready.capacity) if ready is not None else None,
            accepted=None if accepted is None else convert.accepted_load_to_pb(accepted),
            advice=self.advice,
            totals=convert.totals_to_pb(self._totals.totals(report.counters if report is not None else {})),
        )


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()

"""`Fleet.WatchFleet`: the fleet as it is, and then what is different in it.

    registry --look, every LOOK_S or so while somebody watches--> told --what differs from its last look--> watcher

One look serves all watchers. A watcher remembers the look that it was sent last, and is sent the workers that are
others in the newest. So nothing queues for a watcher that reads slowly: the message on its way is all that waits, and
the next one has all that it missed, but for what is again as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from radixfleet.clock import Clock
from radixfleet.errors import Unavailable
from radixfleet.v1 import fleet_pb2
from router.api.report import Reporter, worker_entry
from router.workers.registry import WorkerRegistry

LOOK_S = 0.5
"""Between two looks, but at least LOOK_SPACING times what a look takes: looks at a thousand workers are rarer."""
LOOK_SPACING = 20
HEARTBEAT_S = 5.0
"""Without a look, where those are rarer than this."""
_RECENT_SHARE = 0.9
"""A look no older than this part of the pause between two looks is as good as a new one."""
_AT_A_TIME = 16
"""Workers; the entry of one takes about 0.1 ms, and requests must not wait for those of a thousand."""
_RETRY_AFTER_S = 1.0

_Message = TypeVar("_Message", fleet_pb2.WorkerEntry, fleet_pb2.FleetState)


@dataclass(frozen=True, slots=True)
class _Told:
    """A worker, as of the look that found it so."""

    entry: fleet_pb2.WorkerEntry
    essence: bytes
    """All of it but how long ago things were."""

    def is_news_to(self, was: _Told | None) -> bool:
        """Whether it is another than `was`; None: there was none."""
        return was is None or was.essence != self.essence


class FleetWatch:
    """Serves all who watch the fleet: see the module. On the event loop only."""

    def __init__(self, registry: WorkerRegistry, reporter: Reporter, clock: Clock) -> None:
        self._registry = registry
        self._reporter = reporter
        self._clock = clock
        self._told: dict[str, _Told] = {}
        """By address, in the order in which they were added. Made anew by each look."""
        self._looked_at_s = float("-inf")
        self._pause_s = LOOK_S
        self._looking = asyncio.Lock()
        self._closed = asyncio.Event()

    async def updates(self) -> AsyncGenerator[fleet_pb2.FleetUpdate, None]:
        """What one watcher is sent, a snapshot first. Raises Unavailable when the router stops."""
        await self._look_again()
        known = self._told
        fleet, told_at_s = self._reporter.fleet_state(), self._clock.now()
        yield fleet_pb2.FleetUpdate(snapshot=True, workers=[told.entry for told in known.values()], fleet=fleet)
        while True:
            await self._pause(told_at_s + HEARTBEAT_S)
            await self._look_again()
            before, known = known, self._told
            workers = [told.entry for address, told in known.items() if told.is_news_to(before.get(address))]
            removed = [address for address in before if address not in known]
            fleet_before, fleet, now_s = fleet, self._reporter.fleet_state(), self._clock.now()
            if workers or removed or _essence(fleet) != _essence(fleet_before) or now_s - told_at_s >= HEARTBEAT_S:
                told_at_s = now_s
                yield fleet_pb2.FleetUpdate(workers=workers, removed=removed, fleet=fleet)

    def close(self) -> None:
        """The router stops: nobody watches any longer."""
        self._closed.set()

    async def _pause(self, until_s: float) -> None:
        """Wait for the next look, but until `until_s` at the latest. Raises Unavailable when the router stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self._pause_s, until_s - self._clock.now())):
                await self._closed.wait()
        if self._closed.is_set():
            raise Unavailable("the router stops: watch another one", retry_after_s=_RETRY_AFTER_S)

    async def _look_again(self) -> None:
        """Make a new look, unless there is one that is recent enough."""
        async with self._looking:
            # Watchers pause as long as this, and each shall find something new.
            began_s = self._clock.now()
            if began_s - self._looked_at_s < _RECENT_SHARE * self._pause_s:
                return
            found: dict[str, _Told] = {}
            for number, worker in enumerate(self._registry.workers, 1):
                entry = worker_entry(worker)
                told, before = _Told(entry, _essence(entry)), self._told.get(worker.address)
                # What stays the same is one object in the looks of all watchers, however slowly they read.
                found[worker.address] = told if before is None or told.is_news_to(before) else before
                if number % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
            self._told, self._looked_at_s = found, self._clock.now()
            self._pause_s = max(LOOK_S, LOOK_SPACING * (self._looked_at_s - began_s))


def _essence(message: _Message) -> bytes:
    """The message, serialized, without the times that only pass: two that differ elsewhere are news."""
    essence = type(message)()
    essence.CopyFrom(message)
    for recent in essence.recent:
        recent.ClearField("seconds")
    if isinstance(essence, fleet_pb2.FleetState):
        essence.ClearField("uptime_s")
    return essence.SerializeToString()

"""Members of a fleet, their host and their store, played in this process, for a supervisor to keep."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from deploy.fleet.control import Control
from deploy.fleet.watch import MemberGone, MemberLost
from radixfleet.clock import Clock, MonotonicClock
from radixfleet.errors import InvalidRequest
from radixfleet.membership import MemberReport, Phase
from radixfleet.types import Capacity, Load


@dataclass
class Actor:
    """A member that serves at once."""

    settings: Mapping[str, Any]
    avoid: Sequence[str]
    phase: Phase = "serving"
    message: str = ""
    starts: int = 1
    lingers: bool = False
    """A process that is ended answers once more when it has been replaced: `ray.kill` does not wait for its end."""
    last_words: list[MemberReport] = field(default_factory=list)
    routers: Sequence[str] | None = None
    lost: bool = False
    drains_by_itself: bool = True
    load: Load = field(default_factory=Load)
    node_id: str = "n0"
    placed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.placed.set()


class FakeHosting:
    """Members as entries of a dictionary; what was done to them as a list of words."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.done: list[str] = []
        self.impossible: set[str] = set()
        """Groups of which there can be no member."""
        self.there = {"n0", "n8", "n9"}
        self.taken_away: dict[str, float] = {}
        self.asked: Counter[str] = Counter()
        """How often for a member's report, and for the nodes that are `going`, which is once a turn."""
        self.is_full = False
        self.first_phase: Phase = "serving"
        """Of those that are made."""
        self.held: dict[str, asyncio.Event] = {}
        """Members that are made when the event is set."""
        self.being_made: list[str] = []

    async def names(self) -> set[str]:
        return set(self.actors)

    async def start(
        self, name: str, *, router: bool, settings: Mapping[str, Any], resources: Any, avoid: Sequence[str]
    ) -> None:
        assert name not in self.actors
        self.being_made.append(name)
        if name in self.held:
            await self.held[name].wait()
        if name.rpartition("-")[0] in self.impossible:
            raise InvalidRequest("no half GPUs")
        self.done.append(f"start {name}")
        self.actors[name] = actor = Actor(settings, avoid, self.first_phase)
        if self.is_full:
            actor.placed.clear()

    async def nodes(self) -> set[str]:
        return self.there

    async def going(self) -> dict[str, float]:
        self.asked["going"] += 1
        return self.taken_away

    async def report(self, name: str, routers: Sequence[str] | None) -> MemberReport:
        self.asked[name] += 1
        actor = self.actors.get(name)
        if actor is None:
            raise MemberGone(name)
        await actor.placed.wait()
        if actor.lost:
            raise MemberLost(name)
        if actor.last_words:
            return actor.last_words.pop()
        if routers is not None:
            actor.routers = routers
        return self._told(name, actor)

    def _told(self, name: str, actor: Actor) -> MemberReport:
        port = actor.settings.get("port", 1)
        capacity = Capacity(1000, 16, 4, 512)
        queued = {"m": 0} if name.startswith("router") else {}
        return MemberReport(
            actor.phase,
            actor.message,
            f"10.0.0.1:{port}",
            node_id=actor.node_id,
            pids=(actor.starts,),
            load=actor.load,
            capacity=capacity,
            queued=queued,
        )

    async def drain(self, name: str) -> None:
        self.done.append(f"drain {name}")
        actor = self.actors[name]
        actor.phase = "drained" if actor.drains_by_itself else "draining"

    async def end(self, name: str, *, again: bool, asks: bool = True) -> None:
        if asks and name in self.actors:
            await self.actors[name].placed.wait()
        self.done.append(f"{'restart' if again else 'end'} {name}")
        if again:
            actor = self.actors[name]
            actor.last_words = [self._told(name, actor)] if actor.lingers else []
            actor.starts += 1
            actor.phase = "serving"
        else:
            self.actors.pop(name, None)


class FakeStore:
    """Survives supervisors."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.first_waits: threading.Event | None = None
        """The next to save waits for it, and lets others pass."""
        self.waiting = False

    def load(self) -> bytes | None:
        return self.data

    def save(self, data: bytes) -> None:
        waits, self.first_waits = self.first_waits, None
        if waits is not None:
            self.waiting = True
            waits.wait(60)
        self.data = data


@dataclass
class Scene:
    """One supervisor after the other, over the same members and the same store."""

    hosting: FakeHosting = field(default_factory=FakeHosting)
    store: FakeStore = field(default_factory=FakeStore)
    clock: Clock = field(default_factory=MonotonicClock)

    @asynccontextmanager
    async def supervisor(self) -> AsyncIterator[Control]:
        control = Control(self.hosting, self.store, self.clock, period_s=0.01)
        life = asyncio.create_task(control.run())
        try:
            yield control
        finally:
            life.cancel()
            for task in control.tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await life

    async def sees(self, control: Control, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status for which the condition holds."""
        async with asyncio.timeout(60):
            while not condition(status := await control.status()):  # noqa: ASYNC110  only asking tells
                await asyncio.sleep(0.005)
            return status

    async def settled(self, control: Control, *names: str) -> dict[str, Any]:
        return await self.sees(
            control, lambda status: status["settled"] and {each["name"] for each in status["members"]} == set(names)
        )

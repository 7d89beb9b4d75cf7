"""The handle over child processes that are not there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from radixfleet.errors import Unavailable
from radixfleet.types import WorkerStatus
from tests.support.engine_fakes import ready, submit
from worker.core import codec
from worker.engine import process
from worker.engine.children import Work
from worker.engine.config import EngineConfig
from worker.engine.handle import EngineLoadError, Notice, StateChange
from worker.engine.process import ProcessEngine
from worker.engine.wire import FrameSocket
from worker.runner.sim import SimRunnerConfig


class Undead:
    """Children that load, then say nothing, and take their time to die."""

    is_runner_stopped = False

    def __init__(self) -> None:
        self.socket, theirs = FrameSocket.pair()
        self.engine = self.runner = SimpleNamespace(pid=0)
        self._engine = FrameSocket(theirs)
        self._engine.send(codec.encode(ready()))
        self.killed = asyncio.Event()
        self.may_die = asyncio.Event()

    def work(self) -> Work | None:
        return Work(0.0, 0)

    async def kill(self) -> str:
        self.killed.set()
        return await self.end()

    async def first_to_die(self) -> str:
        return "engine"

    async def end(self) -> str:
        await self.may_die.wait()
        self.socket.close()
        self._engine.close()
        return "was killed"


async def test_stopping_while_a_stuck_engine_is_killed_waits_for_no_more_than_its_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = Undead()
    monkeypatch.setattr(process.Children, "spawn", lambda _config: children)
    config = EngineConfig(
        runner=SimRunnerConfig(), silent_s=1000, stuck_s=0.01, restart_stuck_s=0.02, stop_grace_s=1000
    )
    engine = ProcessEngine(config)
    await engine.start()
    async with asyncio.timeout(60):
        await engine.ready()
        await children.killed.wait()
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        children.may_die.set()
        await stopping
    assert engine.status is WorkerStatus.FAILED
    assert engine.child_pids == ()


async def test_a_supervisor_that_crashes_gives_up_the_engine_and_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for an engine that nobody watches."""

    class Unwatchable(Undead):
        has_bug = False

        @property
        def is_runner_stopped(self) -> bool:  # type: ignore[override]
            if self.has_bug:
                raise RuntimeError("a bug")
            return False

    children = Unwatchable()
    children.may_die.set()
    monkeypatch.setattr(process.Children, "spawn", lambda _config: children)
    engine = ProcessEngine(
        EngineConfig(runner=SimRunnerConfig(), silent_s=1000, stuck_s=0.1, restart_stuck_s=1000, stop_grace_s=0.0)
    )
    changes: list[StateChange] = []
    given_up = asyncio.Event()

    def listen(notice: Notice) -> None:
        if isinstance(notice, StateChange):
            changes.append(notice)
            if notice.final:
                given_up.set()

    engine.subscribe(listen)
    await engine.start()
    async with asyncio.timeout(60):
        await engine.ready()
        stream = engine.submit(submit(engine.next_uid()))
        children.has_bug = True
        await given_up.wait()
        with pytest.raises(Unavailable, match="send the request to another worker"):
            await anext(stream)
        await engine.stop()
    assert engine.status is WorkerStatus.FAILED
    assert engine.num_open == 0


async def test_a_supervisor_that_crashes_during_a_load_leaves_nobody_waiting_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unwatchable(Loading):
        def work(self) -> Work | None:
            raise RuntimeError("a bug")

    with pytest.raises(EngineLoadError, match="supervisor"):
        await load_until_given_up(monkeypatch, Unwatchable())


async def test_a_load_that_hung_and_cannot_be_tried_again_leaves_nobody_waiting_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = [Loading(Work(0.0, 0))]

    def spawn(_config: EngineConfig) -> Loading:
        if not children:
            raise OSError("no process can be made")
        return children.pop()

    monkeypatch.setattr(process.Children, "spawn", spawn)
    config = EngineConfig(runner=SimRunnerConfig(), stuck_s=0.04, load_still_s=0.1, restart_backoff_s=0.0)
    engine = ProcessEngine(config)
    await engine.start()
    async with asyncio.timeout(60):
        with pytest.raises(EngineLoadError, match="no process can be made"):
            await engine.ready()
        await engine.stop()


class Loading(Undead):
    """Children that load for ever and do nothing, so far as the system tells."""

    def __init__(self, *work: Work | None) -> None:
        """`work`: what is told of them, the last for ever."""
        super().__init__()
        self.socket.receive()  # they have not loaded
        self.num_looks = 0
        self._work = work
        self.may_die.set()

    def work(self) -> Work | None:
        self.num_looks += 1
        return self._work[min(self.num_looks, len(self._work)) - 1]


async def load_until_given_up(monkeypatch: pytest.MonkeyPatch, children: Loading) -> None:
    """Looked at every 0.05 s, a load hangs after 0.5. Raises EngineLoadError."""
    monkeypatch.setattr(process.Children, "spawn", lambda _config: children)
    engine = ProcessEngine(EngineConfig(runner=SimRunnerConfig(), stuck_s=0.04, load_still_s=0.5, max_restarts=0))
    await engine.start()
    async with asyncio.timeout(60):
        try:
            await engine.ready()
        finally:
            await engine.stop()


async def test_a_load_is_looked_at_less_often_than_an_engine_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look walks through all processes of the machine, in the process that answers clients."""
    children = Loading(Work(0.0, 0))
    with pytest.raises(EngineLoadError, match="the load hung"):
        await load_until_given_up(monkeypatch, children)
    assert 10 <= children.num_looks <= 11, "not 50: once in five ticks"


async def test_a_load_is_not_judged_while_nobody_knows_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Loading(*[None] * 20, Work(0.0, 0))
    with pytest.raises(EngineLoadError, match="the load hung"):
        await load_until_given_up(monkeypatch, children)
    assert 30 <= children.num_looks <= 31

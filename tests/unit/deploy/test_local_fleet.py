"""What the processes of a fleet on one machine are started with."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from deploy import local_fleet
from deploy.local_fleet import LocalFleet, LocalSpec, stopping_text
from deploy.processes import Child, ChildFailed, ChildSpec
from radixfleet.background import beside
from radixfleet.endpoint import Endpoint
from radixfleet.heard import worker_entry
from radixfleet.types import WorkerStatus
from radixfleet.v1 import fleet_pb2
from radixfleet.watched_file import UnusableFile
from tests.support.waiting import until


def spec(router_options: dict[str, Any], worker_options: dict[str, Any]) -> LocalSpec:
    return LocalSpec(2, router_options, {"device": "cpu", **worker_options}, Path("run"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"log_level": None, "log_json": None}, ()),
        ({"log_level": "debug", "log_json": True}, ("--log-level", "debug", "--log-json")),
        ({"log_json": False}, ("--no-log-json",)),
    ],
)
def test_router_and_workers_log_alike(given: dict[str, Any], expected: tuple[str, ...]) -> None:
    fleet = spec({"port": 7000}, given)
    assert fleet.router().arguments == ("router", *expected, "--port", "7000")
    logging = [part for part in fleet.worker(0, "127.0.0.1:7000").arguments if "log" in part or part == "debug"]
    assert tuple(logging) == expected


def test_a_router_with_a_level_of_its_own_keeps_it() -> None:
    fleet = spec({"log_level": "warning"}, {"log_level": "debug"})
    assert fleet.router().arguments == ("router", "--log-level", "warning")


class _Process:
    """A child that notes when it is told to stop, and how long it may take."""

    def __init__(self, name: str, stopped: list[tuple[str, float]]) -> None:
        self.spec = ChildSpec(name, (), {})
        self._stopped = stopped

    async def stop(self, grace_s: float) -> None:
        self._stopped.append((self.spec.name, grace_s))


async def test_the_router_drains_first_and_every_child_has_its_whole_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[tuple[str, float]] = []

    async def start(child: ChildSpec, _: Path) -> Child:
        return cast("Child", _Process(child.name, stopped))

    monkeypatch.setattr(Child, "start", start)
    told: list[str] = []
    fleet = LocalFleet(replace(spec({}, {}), drain_grace_s=60), told.append)
    fleet.endpoint = "127.0.0.1:1"
    for child in (fleet._spec.router(), *(fleet._spec.worker(index, "127.0.0.1:1") for index in range(2))):
        await fleet._launch(child)
    await fleet.__aexit__(None, None, None)
    assert [name for name, _ in stopped] == ["router", "worker-0", "worker-1"]
    assert all(grace_s > 60 for _, grace_s in stopped)
    assert told == ["stopping: requests that run may end, up to 60 s; Ctrl-C again cuts them"]


async def test_ctrl_c_again_cuts_what_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[tuple[str, float]] = []

    class Busy(_Process):
        async def stop(self, grace_s: float) -> None:
            if grace_s:
                await asyncio.Event().wait()
            await super().stop(grace_s)

    async def start(child: ChildSpec, _: Path) -> Child:
        return cast("Child", Busy(child.name, stopped))

    monkeypatch.setattr(Child, "start", start)
    told: list[str] = []
    fleet = LocalFleet(spec({}, {}), told.append)
    fleet.endpoint = "127.0.0.1:1"
    for child in (fleet._spec.router(), fleet._spec.worker(0, "127.0.0.1:1")):
        await fleet._launch(child)
    leaving = asyncio.create_task(fleet.__aexit__(None, None, None))
    await until(lambda: len(told) == 1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert stopped == [("router", 0), ("worker-0", 0)]
    assert told[1:] == ["cutting what still runs", "cut what still ran\nall processes have ended"]


class _Mortal:
    """A child that listens at once, and dies when it is told to."""

    exit_code: int | None = None
    pid = 4711
    log_path = Path("run/its.log")

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.dies = asyncio.Event()

    async def address(self) -> str:
        return "127.0.0.1:1"

    async def died(self) -> ChildFailed:
        await self.dies.wait()
        return ChildFailed("router ended with signal 9")


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[_Mortal]:
    """Every child that is started, one after the other, without a pause."""
    started: list[_Mortal] = []

    async def start(child: ChildSpec, _: Path) -> Child:
        started.append(_Mortal(child))
        return cast("Child", started[-1])

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(local_fleet, "_FIRST_PAUSE_S", 0.0)
    return started


async def test_who_watches_hears_that_what_died_serves_again(lives: list[_Mortal]) -> None:
    told: list[str] = []
    fleet = LocalFleet(spec({}, {}), told.append)
    fleet.endpoint = "127.0.0.1:1"
    await fleet._launch(fleet._spec.router())
    async with beside(fleet.supervise(), "supervision"):
        for life in range(2):
            await until(lambda life=life: len(lives) == life + 1)
            await until(lambda life=life: len(told) == 2 * life)
            lives[life].dies.set()
        await until(lambda: len(told) == 4)
    end = "router ended with signal 9\nrouter: starting again in 0 s"
    assert told == [end, "router: serves again\n  at 127.0.0.1:1"] * 2


async def test_who_cannot_tell_whether_it_serves_goes_on_restarting_it(lives: list[_Mortal]) -> None:
    def unreadable(_: str) -> Endpoint:
        raise UnusableFile("ca.pem: No such file or directory")

    told: list[str] = []
    fleet = LocalFleet(replace(spec({}, {}), endpoint=unreadable), told.append)
    await fleet._launch(fleet._spec.router())
    await fleet._launch(fleet._spec.worker(0, "127.0.0.1:1"))
    async with beside(fleet.supervise(), "supervision"):
        lives[1].dies.set()
        await until(lambda: len(told) == 2)
        lives[2].dies.set()
        await until(lambda: len(lives) == 4)
    assert told[1] == "worker-0: started again\n  nobody knows whether it serves: ca.pem: No such file or directory"


async def test_an_engine_that_fails_within_a_worker_that_lives_is_told_once_until_it_serves(
    lives: list[_Mortal],
) -> None:
    told: list[str] = []
    fleet = LocalFleet(spec({}, {}), told.append)
    fleet.endpoint = "127.0.0.1:1"
    await fleet._launch(fleet._spec.worker(0, "127.0.0.1:1"))
    served: dict[str, bool] = {}

    def hear(address: str, status: str, worker_id: str = "worker-0", *, connected: bool = True) -> None:
        entry = worker_entry(fleet_pb2.WorkerEntry(worker_id=worker_id, address=address, connected=connected))
        fleet._tell_of_engine(replace(entry, status=WorkerStatus(status)), served)

    for status in ("loading", "serving", "draining", "serving", "failed", "loading", "serving"):
        hear("h:1", status)
        hear("h:9", status, "of-somebody-else")
        hear("h:1", "loading", connected=False)
    assert told == ["worker-0: its engine failed\n  run/its.log says why", "worker-0: serves again\n  at h:1"]
    for status in ("loading", "serving"):  # a new process, of which others tell
        hear("h:2", status)
    assert len(told) == 2


async def test_a_router_that_hangs_is_told_of_once_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[int | None] = [0, None, None, None, 0, None, None]

    class Fleet(LocalFleet):
        async def _running_requests(self) -> int | None:
            return answers.pop(0) if answers else await asyncio.Event().wait()

    async def start(child: ChildSpec, _: Path) -> Child:
        return cast("Child", _Mortal(child))

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(local_fleet, "_LOOK_S", 0.0)
    monkeypatch.setattr(local_fleet, "_SILENCE_S", 0.0)
    told: list[str] = []
    fleet = Fleet(spec({}, {}), told.append)
    fleet.endpoint = "127.0.0.1:1"
    router = await fleet._launch(fleet._spec.router())
    async with beside(fleet.supervise(), "supervision"):
        await until(lambda: len(told) == 3)
        await until(lambda: not answers)
        assert [text.partition("\n")[0] for text in told] == [
            "router: has said nothing for 0 s",
            "router: answers again",
            "router: has said nothing for 0 s",
        ]
        assert f"its process, {router.pid}, stopped" in told[0]


async def test_a_router_that_is_being_started_again_is_not_said_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    class Fleet(LocalFleet):
        async def _running_requests(self) -> int | None:
            nonlocal looks
            looks += 1
            return None

    async def start(child: ChildSpec, _: Path) -> Child:
        dead = _Mortal(child)
        dead.exit_code = -9  # its end is told elsewhere
        return cast("Child", dead)

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(local_fleet, "_LOOK_S", 0.0)
    monkeypatch.setattr(local_fleet, "_SILENCE_S", 0.0)
    told: list[str] = []
    fleet = Fleet(spec({}, {}), told.append)
    fleet.endpoint = "127.0.0.1:1"
    await fleet._launch(fleet._spec.router())
    async with beside(fleet.supervise(), "supervision"):
        await until(lambda: looks >= 3)
    assert told == []


def test_what_a_stopping_fleet_waits_for() -> None:
    assert stopping_text(0, 30) == "stopping"
    assert stopping_text(1, 30) == "stopping: 1 request runs, up to 30 s; Ctrl-C again cuts them"
    assert stopping_text(4, 60) == "stopping: 4 requests run, up to 60 s; Ctrl-C again cuts them"


async def test_a_child_that_cannot_be_started_again_is_tried_on_and_leaves_the_others_alone(
    lives: list[_Mortal], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory, makes = [OSError(12, "Cannot allocate memory")] * 2, Child.start

    async def start(child: ChildSpec, folder: Path) -> Child:
        if len(lives) == 2 and no_memory:
            raise no_memory.pop()
        return await makes(child, folder)

    monkeypatch.setattr(Child, "start", start)
    told: list[str] = []
    fleet = LocalFleet(spec({}, {}), told.append)
    fleet.endpoint = "127.0.0.1:1"
    await fleet._launch(fleet._spec.router())
    await fleet._launch(fleet._spec.worker(0, "127.0.0.1:1"))
    async with beside(fleet.supervise(), "supervision"):
        lives[1].dies.set()
        await until(lambda: len(lives) == 3)
    assert told[1:3] == ["worker-0: cannot be started: Cannot allocate memory\nworker-0: starting again in 0 s"] * 2


async def test_a_token_file_that_was_deleted_is_there_again_for_what_starts_again(
    lives: list[_Mortal], tmp_path: Path
) -> None:
    token = tmp_path / "run" / "admin-token"
    fleet = LocalFleet(replace(spec({}, {}), secrets={token: "sesame\n"}), lambda _: None)
    fleet.endpoint = "127.0.0.1:1"
    await fleet._launch(fleet._spec.router())
    async with beside(fleet.supervise(), "supervision"):
        assert token.read_text() == "sesame\n"
        token.write_text("changed by its operator\n")
        for life, text in enumerate(("changed by its operator\n", "sesame\n")):
            lives[life].dies.set()
            await until(lambda life=life: len(lives) == life + 2)
            assert token.read_text() == text
            shutil.rmtree(token.parent)


async def test_a_router_that_dies_often_has_its_ports_on_its_command_line_once(lives: list[_Mortal]) -> None:
    fleet = LocalFleet(spec({"port": 0}, {}), lambda _: None)
    fleet.endpoint, fleet.http_endpoint = "127.0.0.1:7000", "127.0.0.1:7002"
    await fleet._launch(fleet._spec.router())
    async with beside(fleet.supervise(), "supervision"):
        for life in range(3):
            await until(lambda life=life: len(lives) == life + 1)
            lives[life].dies.set()
        await until(lambda: len(lives) == 4)
    expected = ("router", "--port", "0", "--port", "7000", "--http-port", "7002")
    assert [tuple(each.spec.arguments) for each in lives[1:]] == [expected] * 3

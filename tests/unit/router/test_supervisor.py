"""Which router processes are started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router import supervisor
from router.config import RouterSettings
from router.other_processes import Place
from tests.support.waiting import until


class Pipe:
    """Takes what a process is told."""

    def write(self, _: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class Killed:
    """A process that is killed as soon as it serves."""

    def __init__(self, place: Place) -> None:
        self.stdin = Pipe()
        self.returncode = -9
        self._place = place

    async def wait(self) -> int:
        self._place.announce(1)
        return self.returncode


@asynccontextmanager
async def kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Task[None]]:
    """The task that keeps one process of two running; its pauses are short."""
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.001)
    settings = RouterSettings(processes=2)
    keeping = asyncio.create_task(supervisor._Supervisor(settings, place.folder)._keep(place))
    try:
        yield keeping
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def test_a_process_that_served_is_replaced_though_it_was_killed_before_anybody_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, 0)
    started: list[Killed] = []

    async def start(*_: Any, **__: Any) -> Killed:
        started.append(Killed(place))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    async with kept(place, monkeypatch) as keeping:
        await until(lambda: len(started) > 1 or keeping.done())
        assert not keeping.done()


async def test_a_process_that_cannot_be_started_again_is_tried_on_and_the_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, 0)
    started: list[Killed | None] = []

    async def start(*_: Any, **__: Any) -> Killed:
        started.append(None if len(started) == 1 else Killed(place))
        if started[-1] is None:
            raise OSError(11, "Resource temporarily unavailable")
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    async with kept(place, monkeypatch) as keeping:
        await until(lambda: len(started) > 2 or keeping.done())
        assert not keeping.done()


async def test_addresses_that_cannot_be_told_end_all_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script would wait for the file without end."""

    places = [Place(tmp_path, index) for index in range(2)]

    class Serving(Killed):
        async def wait(self) -> int:
            await super().wait()
            await asyncio.Event().wait()
            raise AssertionError

    async def start(*_: Any, **__: Any) -> Serving:
        return Serving(places.pop())

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    settings = RouterSettings(processes=2, address_file=tmp_path / "no-such-folder" / "address")
    with pytest.raises(FileNotFoundError):
        await supervisor._Supervisor(settings, tmp_path).run()

"""Servers of a run: each in processes of its own, known by a port, frozen while others are measured.

A frozen server takes no processor time at all, whatever it does when it has no requests. Our own worker is left alone:
its watchdogs would take the pause for a fault; what it takes meanwhile is measured instead.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import psutil

from deploy.bench.peers.guard import GRACE_S, descendants

START_S = 900.0
"""Longest time to load: compilers run at the first start of some."""

_POLL_S = 0.2
_TELL_EVERY_S = 10.0
_TAIL_LINES = 12
_MARGIN_S = 10.0


class ServerFailed(Exception):
    """A server did not start or ended; the message holds the end of its log."""


class Server:
    """A server that is not ours, behind its guard. An async context manager: started when entered, gone when left."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], port: int, log: Path) -> None:
        self.port = port
        self._command = command
        self._variables = variables
        self._log = log
        self._guard: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        with self._log.open("wb") as log:
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "deploy.bench.peers.guard", *self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the benchmark alone, which then stops in order
                env={**os.environ, **self._variables},
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guard = self._guard
        assert guard is not None
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            await asyncio.wait_for(guard.wait(), GRACE_S + _MARGIN_S)
        except TimeoutError:  # the server dies with its guard
            guard.kill()
            await guard.wait()

    async def ready(
        self, session: aiohttp.ClientSession, waiting: Callable[[float], None], limit_s: float = START_S
    ) -> None:
        """Wait until `/health` answers 200; `waiting` is told the seconds so far, each ten.

        Raises ServerFailed when the server ends or takes longer.
        """
        clock = asyncio.get_running_loop().time
        began_s = clock()
        next_s = began_s + _TELL_EVERY_S
        try:
            async with asyncio.timeout(limit_s):
                while not await self._is_healthy(session):
                    self._refuse_the_dead()
                    if clock() > next_s:
                        next_s += _TELL_EVERY_S
                        waiting(clock() - began_s)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ServerFailed(self.obituary(f"was not ready within {limit_s:g} s")) from None

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        with suppress(aiohttp.ClientError):
            async with session.get(f"http://127.0.0.1:{self.port}/health") as response:
                return response.status == 200
        return False

    def _refuse_the_dead(self) -> None:
        if self._guard is None or self._guard.returncode is not None:
            code = None if self._guard is None else self._guard.returncode
            raise ServerFailed(self.obituary(f"ended with exit code {code}"))

    def freeze(self) -> None:
        """Stop its processes where they are."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        """Let them go on."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def obituary(self, how: str) -> str:
        """What to tell of a failure: `how`, and the last lines of the log."""
        with self._log.open(encoding="utf-8", errors="replace") as log:
            tail = [line.rstrip() for line in deque(log, _TAIL_LINES) if line.strip()]
        lines = "\n".join(f"  {line}" for line in tail) or "  (it printed nothing)"
        return f"{how}; the end of {self._log}:\n{lines}"

    def _processes(self) -> list[psutil.Process]:
        return [] if self._guard is None else descendants(self._guard.pid)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Several router processes on the same ports: starts them, starts again what dies, stops them together.

The kernel deals connections to the processes (SO_REUSEPORT). The supervisor holds the ports from the start, so nobody
takes them while a process is restarted, and serves nothing itself. Linux and BSD; the processes are equals.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import structlog

from radixfleet.address import local_address
from radixfleet.os_errors import reason_of
from radixfleet.stop_signals import on_stop_signals
from radixfleet.telemetry import setup_logging
from router.config import RouterSettings
from router.other_processes import Place
from router.own_folder import own_folder
from router.process import complain, packed, publish_addresses, run_process, withdraw_addresses

_POLL_S = 0.05
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LASTING_S = 60.0
"""A process that lived for so long is started again without a longer pause."""

_log = structlog.get_logger("radixfleet.router")


class _NeverServed(Exception):
    """A process ended before it served for the first time: another try would end alike."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a router process ended with {code}")
        self.code = code


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or Ctrl-C, in as many processes as the settings say. Returns the exit code.

    For the main thread of a process.
    """
    if settings.processes == 1:
        return run_process(settings)
    setup_logging(settings.log_level, json=settings.log_json)
    try:
        with ExitStack() as stack:
            port = stack.enter_context(_held_port(settings.host, settings.port))
            http_port = settings.http_port
            if http_port >= 0:
                http_port = stack.enter_context(_held_port(settings.host, http_port))
            shared = settings.model_copy(update={"port": port, "http_port": http_port})
            return asyncio.run(_Supervisor(shared, stack.enter_context(own_folder())).run())
    except OSError as error:
        return complain(error)


@contextmanager
def _held_port(host: str, port: int) -> Iterator[int]:
    """The port, kept from all but our own processes. Raises OSError when somebody listens on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as alone, socket.socket(family, socket.SOCK_STREAM) as shared:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            # First without sharing: a router of somebody else's would share the port, and get half of our requests.
            alone.bind((host, port))
            port = alone.getsockname()[1]
            alone.close()
            shared.bind((host, port))
        except OSError as error:
            reason = f"cannot listen on {local_address(host, port)} ({error.strerror}): choose another port, or 0"
            raise OSError(error.errno, reason) from error
        yield port


class _Supervisor:
    """Starts, watches and replaces the processes of one router."""

    def __init__(self, settings: RouterSettings, folder: Path) -> None:
        self._settings = settings
        self._address = local_address(settings.host, settings.port)
        self._places = [Place(folder, index) for index in range(settings.processes)]
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._served: set[int] = set()
        """Which have served: what ended since then is started again, for whatever reason and with whatever code."""

    async def run(self) -> int:
        """Until told to stop; 0, or the exit code of a process that cannot serve."""
        on_stop_signals(self._stop, self._cut)
        try:
            return await self._run()
        finally:
            await asyncio.to_thread(withdraw_addresses, self._settings, self._address, self._settings.http_port)

    async def _run(self) -> int:
        tasks = [asyncio.create_task(work) for work in (self._announce(), *map(self._keep, self._places))]
        ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in ended:
            error = task.exception()
            if isinstance(error, _NeverServed):
                return error.code
            if error is not None:
                raise error
        return 0

    async def _keep(self, place: Place) -> None:
        """Start the process again and again, until all shall stop."""
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._stopping.is_set():
                began_s = loop.time()
                try:
                    why = f"exit code {await self._life(place)}"
                except OSError as error:  # no memory for a process, say
                    if place.index not in self._served:
                        raise
                    why = reason_of(error)
                if self._stopping.is_set():
                    return
                pause_s = _FIRST_PAUSE_S if loop.time() - began_s >= _LASTING_S else min(2 * pause_s, _LONGEST_PAUSE_S)
                _log.error("a router process ended, starting another", process=place.index, why=why, pause_s=pause_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()
        finally:
            self._end(place)

    async def _life(self, place: Place) -> int:
        """One process from its start to its end; its exit code. Raises _NeverServed, and OSError where none starts."""
        settings = self._settings
        metrics_port = settings.metrics_port if place.index == 0 else 0
        own = settings.model_copy(update={"metrics_port": metrics_port, "address_file": None, "processes": 1})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router.process", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal reaches the supervisor alone, which passes it on
        )
        self._processes[place.index] = process
        assert process.stdin is not None, "asked for as a pipe"
        with suppress(ConnectionError):  # it has ended already, and its exit code says why
            process.stdin.write(packed(own, place))
            await process.stdin.drain()
            process.stdin.close()
        if self._stopping.is_set():
            process.terminate()
        code = await process.wait()
        self._served |= await asyncio.to_thread(self._serving)  # it may have been killed before `_announce` looked
        await asyncio.to_thread(place.withdraw)
        if place.index not in self._served and not self._stopping.is_set():
            raise _NeverServed(code)
        return code

    async def _announce(self) -> None:
        """Once all have served, tell scripts and the log where. Raises OSError."""
        while len(self._served) < len(self._places):
            if self._stopping.is_set():
                return
            self._served |= await asyncio.to_thread(self._serving)
            await asyncio.sleep(_POLL_S)  # other processes tell by files
        await asyncio.to_thread(publish_addresses, self._settings, self._address, self._settings.http_port)
        _log.info("all router processes listen", address=self._address, processes=len(self._places))

    def _serving(self) -> set[int]:
        """Which do now, or were killed while they did. Blocks."""
        return {place.index for place in self._places if place.file.exists()}

    def _stop(self) -> None:
        """Each process drains, and ends."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def _cut(self) -> None:
        """Each process cuts its drain short."""
        self._signal(signal.SIGINT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    def _end(self, place: Place) -> None:
        process = self._processes.get(place.index)
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()

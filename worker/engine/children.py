"""The two child processes of one incarnation: spawned, and ended without a trace."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, Self, cast

import msgspec
import psutil

from worker.engine.child import EXIT_RUNNER_GONE
from worker.engine.config import EngineConfig
from worker.engine.wire import FrameSocket

_EXIT_S = 1.0
"""How long a process whose peer is gone may take to end before it is killed."""


class Work(NamedTuple):
    """What processes have done so far, by the system's account."""

    cpu_s: float
    read_bytes: int
    """From files of any kind, and from the disk."""


class Children:
    """Engine and runner. Both are children of the front, tied to its life (`radixfleet.lifeline`) and to its sockets.

        front  <- socketpair ->  engine  <- socketpair ->  runner

    The front keeps only its own end, so that each process sees at once when its peer is gone.
    """

    def __init__(
        self, front_end: FrameSocket, engine: subprocess.Popen[bytes], runner: subprocess.Popen[bytes]
    ) -> None:
        self.socket = front_end
        """To the engine."""
        self.engine = engine
        self.runner = runner
        self._seen_runner = psutil.Process(runner.pid)

    @classmethod
    def spawn(cls, config: EngineConfig) -> Self:
        """Start both, from a thread that lives as long as they shall: the kernel ends them with the thread."""
        front_end, engine_front = FrameSocket.pair()
        engine_runner, runner_end = socket.socketpair()
        with engine_front, engine_runner, runner_end:
            configuration = msgspec.json.encode(config)
            engine = _spawn("worker.engine.engine_process", [engine_front, engine_runner], configuration, os.environ)
            runner = _spawn("worker.engine.runner_process", [runner_end], configuration, config.runner_environment())
        return cls(front_end, engine, runner)

    @property
    def is_runner_stopped(self) -> bool:
        """A signal (SIGSTOP) has stopped the runner process. A step that takes long, or a debugger, does not."""
        try:
            return self._seen_runner.status() == psutil.STATUS_STOPPED
        except psutil.Error:  # it has ended, which its socket tells
            return False

    def work(self) -> Work | None:
        """Of both, and of what they started: compilers, say. None: the system does not tell, or not us.

        Walks through all processes of the machine.
        """
        if not hasattr(psutil.Process, "io_counters"):  # macOS
            return None
        cpu_s, read_bytes = 0.0, 0
        try:
            for process in self._processes():
                with suppress(psutil.NoSuchProcess):
                    cpu_s += sum(process.cpu_times()[:4])  # user, system, and those of its children that ended
                    read_bytes += _read_bytes(process)
        except psutil.AccessDenied:
            return None
        return Work(cpu_s, read_bytes)

    def _processes(self) -> Iterator[psutil.Process]:
        """Both, and what they started, as far as they have not ended."""
        for pid in (self.engine.pid, self.runner.pid):
            with suppress(psutil.NoSuchProcess):  # it has ended, which its socket tells
                root = psutil.Process(pid)
                yield from (root, *root.children(recursive=True))

    async def first_to_die(self) -> str:
        """Once the engine has left its socket, as it ends: "engine", or "runner", which it does not outlive."""
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.engine.wait, _EXIT_S)
        return "runner" if self.engine.returncode == EXIT_RUNNER_GONE else "engine"

    async def end(self) -> str:
        """Once one is gone: reap both, killing what does not end by itself. Returns which ended first, and how."""
        was_slow = not await asyncio.to_thread(_ended_by_itself, self.engine)
        was_first = await asyncio.to_thread(_ended_by_itself, self.runner)
        self.socket.close()
        if self.engine.returncode == EXIT_RUNNER_GONE or (was_slow and was_first):
            return f"the runner {_ending(self.runner)}"
        return f"the engine {_ending(self.engine)}"

    async def kill(self) -> str:
        """End both at once, whatever they are doing, and reap them."""
        self.engine.kill()
        self.runner.kill()
        return await self.end()


def _spawn(
    module: str, sockets: Sequence[socket.socket], configuration: bytes, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    descriptors = [each.fileno() for each in sockets]
    process = subprocess.Popen(
        # -P: a folder named worker in the current directory must not be taken for ours.
        [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, descriptors)],
        stdin=subprocess.PIPE,
        stdout=2,
        pass_fds=descriptors,
        env=environment,
    )
    # A child that ends before it has read its configuration is noticed by its socket.
    with suppress(BrokenPipeError), cast(IO[bytes], process.stdin) as pipe:
        pipe.write(configuration)
    return process


def _read_bytes(process: psutil.Process) -> int:
    told = process.io_counters()
    return int(told.read_chars + told.read_bytes) + _num_faults(process.pid) * mmap.PAGESIZE


def _num_faults(pid: int) -> int:
    """Pages that were waited for when they were touched, also by children that ended: reads of a file that is mapped,
    of which those counted in bytes are none where no disk is behind it (FUSE, a network). 0 when it has ended.
    """
    with suppress(OSError):
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")  # the name before may hold anything
        return sum(map(int, fields.split()[9:11]))  # majflt and cmajflt: the first field here is the third, `state`
    return 0


def _ended_by_itself(process: subprocess.Popen[bytes]) -> bool:
    """Reap it; False: it had to be killed."""
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"

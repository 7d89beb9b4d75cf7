"""A worker of ours as a process with a simulated device, to be stopped and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.tiny_model import tiny_model
from tests.support.waiting import until

START_S = 120.0


@dataclass(frozen=True)
class StoppableWorker:
    """One that runs."""

    name: str
    process: asyncio.subprocess.Process
    address: str

    async def stop(self) -> None:
        """It hangs, and its connections stay."""
        self.process.send_signal(signal.SIGSTOP)
        watched = psutil.Process(self.process.pid)
        await until(lambda: watched.status() == psutil.STATUS_STOPPED, f"{self.name} is stopped")

    def wake(self) -> None:
        """It goes on as if nothing had been."""
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def worker_process(name: str, folder: Path) -> AsyncIterator[StoppableWorker]:
    """Listening when entered, killed when left. All of it is one process."""
    file = folder / name
    command = ["-m", "worker", "--inline", "--model", str(tiny_model()), "--runner", "sim", "--worker-id", name]
    command += ["--port", "0", "--metrics-port", "0", "--address-file", str(file), "--log-level", "error"]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        await until(file.exists, f"{name} listens", timeout_s=START_S)
        yield StoppableWorker(name, process, file.read_text().strip())
    finally:
        process.kill()
        await process.wait()

"""A worker of ours with a simulated device as a process, to be stopped, killed and started again."""

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


@dataclass
class WorkerProcess:
    """One worker, in as many processes one after the other as it takes. All of it is one process."""

    name: str
    folder: Path
    routers: str = ""
    starts: int = 0
    process: asyncio.subprocess.Process | None = None
    address: str = ""

    async def start(self) -> None:
        """Returns when it listens."""
        self.starts += 1
        file = self.folder / f"{self.name}-{self.starts}"
        options = {
            "--model": str(tiny_model()),
            "--runner": "sim",
            "--port": "0",
            "--metrics-port": "0",
            "--worker-id": self.name,
            "--address-file": str(file),
            "--log-level": "error",
        } | ({"--routers": self.routers} if self.routers else {})
        command = [part for option in options.items() for part in option]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "worker", "--inline", *command, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        await until(file.exists, f"{self.name} listens", timeout_s=START_S)
        self.address = file.read_text().strip()

    async def stop(self) -> None:
        """It hangs, and its connections stay."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        watched = psutil.Process(self.process.pid)
        await until(lambda: watched.status() == psutil.STATUS_STOPPED, f"{self.name} is stopped")

    def wake(self) -> None:
        """It goes on as if nothing had been."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """As kill -9 does."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def worker_process(name: str, folder: Path) -> AsyncIterator[WorkerProcess]:
    """Listening when entered, killed when left."""
    worker = WorkerProcess(name, folder)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.kill()

"""Child processes of a local fleet: started with a log file each, known by the address they publish, stopped politely.

A child is one `radixfleet router` or `radixfleet worker`. It binds a port that the system picks and writes the address
to a file; the parent waits for the file or for the child's death, whichever comes first, so nothing waits for time.
Children die with their parent, however it dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PARENT_VARIABLE = "RADIXFLEET_PARENT_PID"
"""Set for children: `deploy.command_line.run` binds its life to that process."""

_POLL_S = 0.05
_TAIL_BYTES = 4000


class ChildFailed(Exception):
    """A child ended before it was asked to. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start: a name for people, the arguments of the `radixfleet` command, and additions to the environment."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    settings: Mapping[str, Any] | None = field(default=None, repr=False)
    """For its `--config`: a file that only its user can read, since what is secret must not stand on a command line."""


class Child:
    """One running process. Made by `start`; everything it prints goes to `log_path`."""

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, address_path: Path, log_path: Path
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self._process = process
        self._address_path = address_path

    @classmethod
    async def start(cls, spec: ChildSpec, run_dir: Path) -> Child:
        """Start the process; `run_dir` (made if it is missing) holds its log, settings and address. Raises OSError."""
        await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
        arguments = spec.arguments
        if spec.settings is not None:
            settings_path = run_dir / f"{file_stem(spec.name)}.yaml"
            await asyncio.to_thread(write_secret, settings_path, yaml.safe_dump(dict(spec.settings)))
            arguments = (*arguments, "--config", str(settings_path))
        address_path = run_dir / f"{file_stem(spec.name)}.address"
        _http_path(address_path).unlink(missing_ok=True)
        address_path.unlink(missing_ok=True)
        log_path = run_dir / f"{file_stem(spec.name)}.log"
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "deploy.cli", *arguments, "--address-file", str(address_path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the parent alone, which then stops in order
                env={**os.environ, **spec.environment, PARENT_VARIABLE: str(os.getpid())},
            )
        return cls(spec, process, address_path, log_path)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def address(self) -> str:
        """host:port, as soon as the child listens. Raises ChildFailed when it ends instead."""
        while not self._address_path.exists():
            if self.exit_code is not None:
                raise ChildFailed(self._obituary())
            await asyncio.sleep(_POLL_S)
        return self._address_path.read_text().strip()

    def http_address(self) -> str:
        """host:port of a router's HTTP; empty: it serves none. After `address`."""
        path = _http_path(self._address_path)
        return path.read_text().strip() if path.exists() else ""

    async def died(self) -> ChildFailed:
        """Wait for the end of the process, and say how it ended."""
        await self._process.wait()
        return ChildFailed(self._obituary())

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL when the grace is over. Does nothing to a process that has ended."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        _http_path(self._address_path).unlink(missing_ok=True)
        self._address_path.unlink(missing_ok=True)

    def _obituary(self) -> str:
        tail = _tail(self.log_path)
        how = f"exit code {self.exit_code}" if (self.exit_code or 0) >= 0 else f"signal {-(self.exit_code or 0)}"
        lines = "\n".join(f"  {line}" for line in tail) or "  (it printed nothing)"
        return f"{self.spec.name} ended with {how}; the end of {self.log_path}:\n{lines}"


def file_stem(name: str) -> str:
    """What the files of a child are called: workers of a model have its slashes in their names, and never a plus."""
    return name.replace("/", "+")


def write_secret(path: Path, text: str) -> None:
    """A new file, in the place of what was there, that only its user can read; with its folder. Raises OSError.

    However many write it at once, whoever reads finds one of them whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(new, path)
    except OSError:
        os.unlink(new)
        raise


def _tail(log_path: Path) -> list[str]:
    """The last lines; none of a log that somebody has deleted."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip().splitlines()[-12:]
    except FileNotFoundError:
        return []


def _http_path(address_path: Path) -> Path:
    return address_path.with_name(f"{address_path.name}.http")

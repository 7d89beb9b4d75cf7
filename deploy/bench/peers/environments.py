"""Virtual environments for other people's programs, in the cache folder: made once, step by step, never in ours.

What is done stands in `installed.txt`, a line a step. An environment whose lines are no beginning of what is wanted now
is made anew; one that was interrupted goes on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from deploy.progress import Tell
from worker.model.demo_model import cache_directory

_STEP_S = 3600.0
_TELL_EVERY_S = 5.0
_TAIL_LINES = 12
_STAMP = "installed.txt"
_CHARACTERS = 90


class InstallFailed(Exception):
    """A step of an installation failed; the message holds the end of its log."""


def peers_directory() -> Path:
    """Where environments, checkpoints and logs of the peers are."""
    return cache_directory() / "peers"


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def environment(folder: Path, *steps: Sequence[str], tell: Tell) -> Path:
    """The interpreter of an environment in `folder` that has had these steps: arguments of `pip install`, in order.

    Raises InstallFailed.
    """
    python, stamp = python_of(folder), folder / _STAMP
    wanted = [" ".join(step) for step in steps]
    done = stamp.read_text().splitlines() if stamp.exists() else []
    if done == wanted:
        return python
    if not python.exists() or done != wanted[: len(done)]:
        shutil.rmtree(folder, ignore_errors=True)
        done = []
        logged([sys.executable, "-m", "venv", str(folder)], folder.with_suffix(".log"), tell, "making an environment")
    for step, line in zip(steps[len(done) :], wanted[len(done) :], strict=True):
        what = f"installing, step {len(done) + 1} of {len(wanted)}"
        logged([str(python), "-m", "pip", "install", *step], folder / "install.log", tell, what)
        done.append(line)
        stamp.write_text("\n".join(done))
    return python


def has_steps(folder: Path, *steps: Sequence[str]) -> bool:
    """Whether `environment` would find nothing to do."""
    stamp = folder / _STAMP
    return stamp.exists() and stamp.read_text().splitlines() == [" ".join(step) for step in steps]


def requirements(python: Path, package: str, without: Sequence[str]) -> list[str]:
    """What an installed package asks for, without its extras and without what is named."""
    program = (
        "import re, sys\nfrom importlib.metadata import requires\n"
        "for line in requires(sys.argv[1]) or ():\n"
        "    name = re.split(r'[^A-Za-z0-9_-]', line)[0].lower()\n"
        "    if 'extra ==' not in line and name not in sys.argv[2:]:\n"
        "        print(line)\n"
    )
    told = subprocess.run([str(python), "-c", program, package, *without], check=True, capture_output=True, text=True)
    return told.stdout.splitlines()


def logged(
    command: Sequence[str],
    log: Path,
    tell: Tell,
    what: str,
    *,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a command of an installation, telling its last line now and then. Raises InstallFailed.

    Compilers that it has started end with it, however this ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    tell(what)
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(variables or {})},
            process_group=0,
        )
    try:
        while child.poll() is None:
            try:
                child.wait(_TELL_EVERY_S)
            except subprocess.TimeoutExpired:
                elapsed_s = time.monotonic() - began_s
                if elapsed_s > _STEP_S:
                    raise InstallFailed(f"{what}: took more than {_STEP_S:g} s; see {log}") from None
                tell(f"{what}, {elapsed_s:.0f} s: {(_tail(log, 1) or [''])[0][:_CHARACTERS]}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        lines = "\n".join(f"  {line}" for line in _tail(log, _TAIL_LINES))
        raise InstallFailed(f"{what}: exit code {child.returncode}; the end of {log}:\n{lines}")


def _tail(log: Path, lines: int) -> list[str]:
    text = log.read_bytes()[-8192:].decode(errors="replace").replace("\r", "\n")
    return [line.strip() for line in text.splitlines() if line.strip()][-lines:]

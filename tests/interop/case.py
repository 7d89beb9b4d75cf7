"""One client: what it needs, and what is done with it. Environments stand outside the tree and are made once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.interop.fleet import LiveFleet

HERE = Path(__file__).parent
_INSTALL_S = 1800.0


class Failed(Exception):
    """The client did not do what it should. The message has the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a case works with."""

    fleet: LiveFleet
    environments: Path
    """Folder of all environments."""
    output: Path
    """Folder for what this case writes."""
    silence_s: int
    """How long streams are silent where that is tried."""

    def python(self, name: str, packages: Sequence[str], *, dependencies: bool = True) -> Path:
        """The interpreter of an environment with `packages`; the folder of the other commands is its parent.

        `dependencies`: install theirs too.
        """
        folder = self.environments / name
        python = folder / "bin" / "python"
        wanted = "\n".join(packages)
        stamp = folder / "installed.txt"
        if not stamp.exists() or stamp.read_text() != wanted:
            uv = self._uv()
            run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], timeout_s=_INSTALL_S)
            options = [] if dependencies else ["--no-deps"]
            install = [uv, "pip", "install", "--quiet", "--python", str(python), *options, *packages]
            run(install, timeout_s=_INSTALL_S)
            stamp.write_text(wanted)
        return python

    def _uv(self) -> str:
        """Many times faster than pip where hundreds of packages come."""
        folder = self.environments / "uv"
        uv = folder / "bin" / "uv"
        if not uv.exists():
            run([sys.executable, "-m", "venv", str(folder)], timeout_s=_INSTALL_S)
            run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"], timeout_s=_INSTALL_S)
        return str(uv)

    def node(self, name: str, packages: Mapping[str, str]) -> Path:
        """A folder in which node finds `packages`."""
        folder = self.environments / name
        manifest = json.dumps({"private": True, "type": "module", "dependencies": dict(packages)})
        stamp = folder / "installed.json"
        if not stamp.exists() or stamp.read_text() != manifest:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text(manifest)
            run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=folder, timeout_s=_INSTALL_S)
            stamp.write_text(manifest)
        return folder


@dataclass(frozen=True, slots=True)
class Case:
    """A client, and what is run with it."""

    name: str
    client: str
    """Name and version, for the table."""
    what: str
    """What is run, for the table."""
    run: Callable[[Context], str]
    """Returns a remark for the table, perhaps empty. Raises Failed."""
    needs: tuple[str, ...] = field(default=())
    """Commands that must be installed."""


def run(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
    stdin: str | None = None,
) -> str:
    """What a command printed. Raises Failed when it fails or takes longer."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | (environment or {}),
            timeout=timeout_s,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        raise Failed(f"{command[0]} took longer than {timeout_s:.0f} s\n{_tail(printed)}") from None
    if done.returncode:
        raise Failed(f"{' '.join(command)[:200]} ended with {done.returncode}\n{_tail(done.stdout)}")
    return done.stdout


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-40:])

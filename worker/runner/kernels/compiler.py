"""Compiles the kernels: C files of this directory become one shared library in the user's cache.

The library's name is a hash of the sources, the compiler and the features of the CPU that it compiles for, so a new
version, another compiler or another machine (home directories may be shared) gets its own. It is put in place by a
rename: workers that start at the same time do not see half of a file, and the last one's stays.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-psabi")
_TIMEOUT_S = 120


class KernelsUnavailable(Exception):
    """There are no kernels on this machine; the message says why."""


def find_compiler() -> list[str] | None:
    """The command of the C compiler: $CC, or the first of the usual ones."""
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    return next(([path] for name in _COMPILERS if (path := shutil.which(name))), None)


def compiled_library() -> Path:
    """The library, compiled now if need be, which takes some seconds. Raises KernelsUnavailable."""
    compiler = find_compiler()
    if compiler is None:
        raise KernelsUnavailable("no C compiler (cc, gcc, clang or $CC)")
    name = f"kernels-{_fingerprint(compiler)}.so"
    for directory in _cache_directories():
        library = directory / name
        if library.exists():
            return library
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                built = Path(scratch) / name
                _compile(compiler, built)
                built.replace(library)
        except OSError:
            continue
        return library
    raise KernelsUnavailable("no directory to keep the compiled kernels in; set XDG_CACHE_HOME to one that is writable")


def _cache_directories() -> list[Path]:
    """The user's cache. Never a shared directory: whoever can write there could plant code."""
    base = os.environ.get("XDG_CACHE_HOME")
    return [(Path(base) if base else Path.home() / ".cache") / "radixfleet"]


def _fingerprint(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(" ".join(_FLAGS).encode())
    digest.update(_run([*compiler, "--version"]))
    digest.update(_run([*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull]))
    return digest.hexdigest()[:24]


def _compile(compiler: list[str], target: Path) -> None:
    sources = [str(path) for path in sorted(_SOURCES.glob("*.c"))]
    _run([*compiler, *_FLAGS, "-shared", *sources, "-lm", "-o", str(target)])


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} does not work: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise KernelsUnavailable(f"{command[0]} failed: {lines[0] if lines else 'no message'}")
    return done.stdout

"""Compiles the kernels: C files of this directory become one shared library in the user's cache.

The library's name is a hash of the sources, the compiler and the features of the CPU that it compiles for, so a new
version, another compiler or another machine (home directories may be shared) gets its own. Workers that start at the
same time take turns, so that one compiles and the others find what it made; it is put in place by a rename, so nobody
sees half of a file. Where nothing can be kept, each process compiles its own, and where programs may not run from the
cache, each loads a copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)
"""In workers it is logged like the rest; commands that set up no logs have warnings on stderr, beside their answer."""
_SOURCES = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
_FOR_THIS_CPU = ("-march=native", "-mcpu=native")
"""Some compilers know only the second, on ARM."""
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-psabi")
_TIMEOUT_S = 120.0
_TURN_EVERY_S = 0.1
_SCRATCH = "build-"
_INSTALL = "install a C compiler (gcc or clang)"
_CHANGE_CC = "set CC to a C compiler that works, or unset it"
_SET_CC = "set CC to a C compiler that works"


class KernelsUnavailable(Exception):
    """There are no kernels on this machine; the message says why, `advice` what to change, where that is known."""

    def __init__(self, why: str, advice: str = "") -> None:
        super().__init__(why)
        self.advice = advice


def find_compiler() -> list[str] | None:
    """The command of the C compiler: $CC, or the first of the usual ones. Raises KernelsUnavailable for a wrong $CC."""
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise KernelsUnavailable(f"$CC is not a command: {error}", _CHANGE_CC) from error
    if chosen:
        return chosen
    return next(([path] for name in _COMPILERS if (path := shutil.which(name))), None)


def load_compiled(load: Callable[[Path], T]) -> T:
    """What `load` makes of the library, which is compiled before, if need be; that takes some seconds.

    A library that `load` has an OSError for (cut off by a full disk or a crash), also for a copy of it elsewhere, is
    compiled anew, once. The file may be gone when this returns. Raises KernelsUnavailable.
    """
    compiler = find_compiler()
    if compiler is None:
        raise KernelsUnavailable("no C compiler (cc, gcc, clang or $CC)", _INSTALL)
    command = [*compiler, _flag_for_this_cpu(compiler), *_FLAGS]
    name = f"kernels-{_fingerprint(command)}.so"
    try:
        return _loaded_from(_own_cache() / name, command, load)
    except OSError as error:
        _log.warning("the compiled kernels cannot be kept, every start compiles them: %s", error)
    try:
        with tempfile.TemporaryDirectory(prefix="radixfleet-") as scratch:
            _compile(command, Path(scratch) / name)
            return load(Path(scratch) / name)
    except OSError as error:
        raise _of_no_use(error) from error


def _does_not_work(why: str) -> KernelsUnavailable:
    return KernelsUnavailable(why, _CHANGE_CC if os.environ.get("CC", "").strip() else _SET_CC)


def _of_no_use(error: OSError) -> KernelsUnavailable:
    return KernelsUnavailable(
        f"the compiled kernels cannot be loaded: {error}",
        "set XDG_CACHE_HOME, or TMPDIR, to a directory of your own from which programs may run",
    )


def _own_cache() -> Path:
    """The user's cache. Raises OSError where it is none: whoever else can write there could plant code.

    $XDG_CACHE_HOME counts where it is absolute: the XDG Base Directory Specification has relative paths ignored.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        directory = (base if base.is_absolute() else Path.home() / ".cache") / "radixfleet"
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from error
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_others(directory.resolve())
    return directory


def _refuse_others(path: Path) -> None:
    """Raises OSError unless the path itself, no link, is this user's or root's, and nobody else may write to it."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} is not your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} can be written to by others")


def _loaded_from(library: Path, command: list[str], load: Callable[[Path], T]) -> T:
    """Raises OSError where the cache can neither be used nor written to; KernelsUnavailable."""
    with suppress(OSError):  # what it was is told below, if it still holds then
        return _loaded(library, load)
    with _turn(library.parent):
        try:
            return _loaded(library, load)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("the compiled kernels cannot be loaded and are compiled anew: %s", error)
        _build(library, command)
    try:
        return _loaded(library, load)
    except OSError as error:
        raise _of_no_use(error) from error


def _loaded(library: Path, load: Callable[[Path], T]) -> T:
    """From a copy, where programs may not run from the cache. Raises OSError."""
    _refuse_others(library)
    try:
        return load(library)
    except OSError as error:
        with tempfile.TemporaryDirectory(prefix="radixfleet-") as scratch:
            loaded = load(Path(shutil.copy(library, scratch)))
        _log.warning("programs may not run from the cache, the compiled kernels are loaded from a copy: %s", error)
        return loaded


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Waits for others that compile, but no longer than they may take: then both do."""
    with (directory / "kernels.lock").open("w") as lock:
        with suppress(OSError):  # file systems without locks: then all compile
            _wait_for(lock)
        yield


def _wait_for(lock: TextIO, patience_s: float = _TIMEOUT_S) -> None:
    give_up_s = time.monotonic() + patience_s
    for attempt in itertools.count():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == 0:
                _log.info("another process is compiling the kernels in C: waiting for it")
            if time.monotonic() >= give_up_s:
                _log.warning("another process has been compiling for %.0f s: compiling as well", patience_s)
                return
            time.sleep(_TURN_EVERY_S)
        else:
            return


def _build(library: Path, command: list[str]) -> None:
    _sweep(library.parent)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        _compile(command, built)
        built.chmod(0o755)  # whatever the umask: see `_refuse_others`
        with built.open("rb") as file:
            os.fsync(file.fileno())  # a rename that outlives a crash must not leave an empty file
        built.replace(library)


def _sweep(directory: Path) -> None:
    """Removes what starts that were killed have left: nobody compiles for as long."""
    for scratch in directory.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if time.time() - scratch.stat().st_mtime > 2 * _TIMEOUT_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _flag_for_this_cpu(compiler: list[str]) -> str:
    for flag in _FOR_THIS_CPU[:-1]:
        if _finished(_features_command([*compiler, flag])).returncode == 0:
            return flag
    return _FOR_THIS_CPU[-1]


def _features_command(command: list[str]) -> list[str]:
    return [*command, "-dM", "-E", "-x", "c", os.devnull]


def _fingerprint(command: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(shlex.join(command).encode())
    digest.update(_output([*command, "--version"]))
    digest.update(_output(_features_command(command)))
    return digest.hexdigest()[:24]


def _compile(command: list[str], target: Path) -> None:
    _log.info("compiling the kernels in C with %s, which takes some seconds, once for this machine", command[0])
    sources = [str(path) for path in sorted(_SOURCES.glob("*.c"))]
    _output([*command, "-shared", *sources, "-lm", "-o", str(target)])
    if not target.is_file():
        raise _does_not_work(f"{command[0]} reported success, but wrote no library")


def _output(command: list[str]) -> bytes:
    done = _finished(command)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise _does_not_work(f"{command[0]} failed: {said}")
    return done.stdout


def _finished(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Runs a compiler, in a process group of its own: where it is broken off, what it has started ends too."""
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=_TIMEOUT_S)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        raise _does_not_work(f"{command[0]} did not end within {_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise _does_not_work(f"{command[0]} does not work: {error.strerror or error}") from error
    return subprocess.CompletedProcess(command, process.returncode, output, errors)

"""Values of files that are read again when the files change: certificates and keys are replaced while we run.

`Watched.current` looks at the files at most once a second, and so costs nothing where it is called for each request. A
file that became unreadable or wrong does not take the process down: the last good value stays, and the log says why.
May be called from any thread: gRPC asks for certificates on threads of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import structlog

from radixfleet.clock import Clock, MonotonicClock

_LOOK_EVERY_S = 1.0

T = TypeVar("T")

_Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]

_log = structlog.get_logger("radixfleet.files")


class UnusableFile(OSError):
    """A file of certificates or keys that is missing, unreadable or wrong. The message says which and what to do."""


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises UnusableFile."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnusableFile(f"cannot read {path}: {error.strerror}") from error


class Watched(Generic[T]):
    """A value that `read` makes of some files, made again when the files change."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], clock: Clock | None = None) -> None:
        """Reads at once. `read` raises UnusableFile, and so does this."""
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        # Looked at before reading: a change in between is seen at the next look.
        self._stamp = self._look()
        self._looked_at_s = self._clock.now()
        self._value = read()

    def current(self) -> T:
        """The value of the files as they were within the last second, or the last one that was good."""
        if not self._paths or self._clock.now() - self._looked_at_s < _LOOK_EVERY_S:
            return self._value
        with self._lock:
            self._looked_at_s = self._clock.now()
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._take_up()
            return self._value

    def _take_up(self) -> None:
        names = [str(path) for path in self._paths]
        try:
            self._value = self._read()
        except UnusableFile as error:
            _log.error("changed files cannot be used; going on with what they held before", error=str(error))
        else:
            _log.info("changed files are in use", files=names)

    def _look(self) -> _Stamp:
        """Follows symbolic links, by whose exchange Kubernetes replaces mounted secrets."""
        stamp: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                stamp.append(None)
            else:
                stamp.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(stamp)

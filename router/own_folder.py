"""A folder among the temporary files that goes when its process goes.

A process that is killed cannot clean up. So whoever makes such a folder keeps a file in it locked, which the kernel
unlocks when the process ends, however it ends; and the next one of the same user removes folders whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "radixfleet-router-"
_LOCK = "lock"


@contextmanager
def own_folder(among: Path | None = None) -> Iterator[Path]:
    """Gives a new folder that only this user may enter. Raises OSError. Blocks.

    `among`: where it is to be; default: where the system keeps temporary files.
    """
    parent = among or Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as name:
        folder = Path(name)
        with (folder / f"{_LOCK}.partial").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f"{_LOCK}.partial").replace(folder / _LOCK)  # whoever finds it finds it locked
            with kept(folder):
                yield folder


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """From systemd-tmpfiles, which takes away what lies in /tmp unused for days, but for what is in locked folders.

    Several may keep one. Where the file system has no locks, nobody does. Raises OSError where there is no such folder.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_SH)
        yield
    finally:
        os.close(held)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # another user's, not whole yet, just removed, or locked: its process lives
        if folder.lstat().st_uid != os.getuid():
            return
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)

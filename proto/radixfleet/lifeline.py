"""Ties a child process to the life of the process that spawned it, however that one ends (kill -9 included)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies. Call it first thing in a child's main.

    `parent_pid`: the spawner's own os.getpid(), handed to the child. A parent that died before this call can no longer
    trigger the signal, so the child then exits at once. Linux only; elsewhere the call does nothing but that check, and
    a child relies on seeing its parent's end of a pipe or socket closed. The kernel watches the *thread* that spawned
    the child: spawn from one that lives as long as the child should.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the process that started this one is gone")


async def exit_with_parent(period_s: float = 1.0) -> None:
    """End this process at once when the one that started it has ended; runs until cancelled.

    For a parent that starts children from threads which come and go, so that `die_with_parent` would be wrong: Ray's
    raylet. Ray's own check takes a dead raylet for a living one while nobody has reaped it, as in containers without an
    init.
    """
    parent_pid = os.getppid()
    while os.getppid() == parent_pid:  # noqa: ASYNC110  nothing tells
        await asyncio.sleep(period_s)
    os._exit(1)

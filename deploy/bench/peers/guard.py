"""Stands between this benchmark and a server that is not ours: `python -m deploy.bench.peers.guard COMMAND...`.

A server of others does not know that it should end with us, and neither do the processes that it starts. This one
knows: its standard input is a pipe that the benchmark holds open. When that closes, because the benchmark is done or
because it was killed, the server is asked to end, and all that is left of it is killed. The guard adopts what the
server leaves behind; should the guard itself be killed, the server goes too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import psutil

from radixfleet.lifeline import die_with_parent

GRACE_S = 10.0
"""For a server that was asked to end."""

_PR_SET_CHILD_SUBREAPER = 36


def main(command: Sequence[str]) -> int:
    """Run `command` until it ends or standard input does; its exit code, of a signal 128 and more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the pipe says when
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard_pid = os.getpid()

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(guard_pid)

    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    threading.Thread(target=_end_with_the_pipe, args=(server,), daemon=True).start()
    code = server.wait()
    kill(descendants(guard_pid))
    return code if code >= 0 else 128 - code


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill(processes: Sequence[psutil.Process]) -> None:
    """At once, and wait for their ends."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GRACE_S)


def _end_with_the_pipe(server: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    for process in descendants(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            process.resume()  # one that is frozen hears nothing
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
        return
    kill(descendants(os.getpid()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The two processes of an engine: what they do, and which of them ended first."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import psutil
import pytest

from tests.support.waiting import until
from worker.engine import children as module
from worker.engine.children import Children, Work
from worker.engine.wire import FrameSocket

WAITS = "import signal; signal.pause()"
BUSY = "while True: open('/dev/null').read()"


def process(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def children_of(engine: str, runner: str) -> Children:
    ours, theirs = FrameSocket.pair()
    theirs.close()
    return Children(ours, process(engine), process(runner))


def done_by(children: Children) -> Work:
    work = children.work()
    assert work is not None
    return work


async def test_a_runner_that_ended_first_is_named_also_where_its_engine_is_slow_to_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the engine may need longer than it gets, and is killed: that is not why all ended."""
    children = children_of(WAITS, "raise SystemExit(7)")
    children.runner.wait()
    monkeypatch.setattr(module, "_EXIT_S", 0.01)
    assert await children.end() == "the runner ended with exit code 7"


async def test_what_both_and_their_own_children_have_done_is_told_and_grows() -> None:
    own_child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    children = children_of(WAITS, own_child)
    try:
        before = done_by(children)
        await until(lambda: done_by(children).cpu_s > before.cpu_s + 1.0)
        assert done_by(children).read_bytes >= before.read_bytes
    finally:
        for own in psutil.Process(children.runner.pid).children():
            own.kill()
        await children.kill()


async def test_processes_that_are_gone_have_done_nothing_more() -> None:
    children = children_of("", "")
    await children.end()
    assert children.work() == (0.0, 0)


async def test_where_the_system_does_not_tell_what_they_read_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS, or of processes of others: what they compute alone would make a slow disk look like one that hangs."""

    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    children = children_of(WAITS, WAITS)
    try:
        monkeypatch.setattr(psutil.Process, "io_counters", refuse)
        assert children.work() is None
        monkeypatch.delattr(psutil.Process, "io_counters")
        assert children.work() is None
    finally:
        await children.kill()


async def test_pages_of_a_mapped_file_that_are_waited_for_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no disk is behind the file, nothing else tells."""
    children = children_of(WAITS, WAITS)
    try:
        monkeypatch.setattr(module, "_num_faults", lambda _: 0)
        before = done_by(children)
        monkeypatch.setattr(module, "_num_faults", lambda _: 5)
        assert done_by(children).read_bytes >= before.read_bytes + 2 * 5 * 4096
    finally:
        await children.kill()


def test_the_pages_that_were_waited_for_are_those_that_the_system_counts() -> None:
    def counted() -> int:
        users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(resource.getrusage(user).ru_majflt for user in users)

    before = counted()
    told = module._num_faults(os.getpid())
    assert before <= told <= counted()

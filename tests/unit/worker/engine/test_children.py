"""The two processes of an engine: what they do, and which of them ended first."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.support.waiting import until
from worker.engine import children as module
from worker.engine.children import Children
from worker.engine.wire import FrameSocket

WAITS = "import signal; signal.pause()"
BUSY = "while True: open('/dev/null').read()"


def process(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def children_of(engine: str, runner: str) -> Children:
    ours, theirs = FrameSocket.pair()
    theirs.close()
    return Children(ours, process(engine), process(runner))


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
        before = children.work()
        await until(lambda: children.work().cpu_s > before.cpu_s + 1.0)
        assert children.work().read_bytes >= before.read_bytes
    finally:
        for own in psutil.Process(children.runner.pid).children():
            own.kill()
        await children.kill()


async def test_processes_that_are_gone_have_done_nothing_more() -> None:
    children = children_of("", "")
    await children.end()
    assert children.work() == (0.0, 0)

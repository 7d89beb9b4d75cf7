"""Behaviour 61: a child never outlives the process that spawned it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.support.processes import survivors
from tests.support.waiting import until

CHILD = """
import sys, time
from radixfleet.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
print("tied", flush=True)
sys.stdin.read()
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_whose_parent_was_gone_before_it_could_be_tied_ends() -> None:
    stranger = os.getppid()
    child = subprocess.run([sys.executable, "-c", CHILD, str(stranger)], capture_output=True, text=True, timeout=30)
    assert child.returncode == 1
    assert "is gone" in child.stderr
    assert child.stdout == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel offers nothing of the kind")
def test_killing_the_parent_ends_the_child_although_its_stdin_stays_open() -> None:
    ours, theirs = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=ours, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        _, survivors = psutil.wait_procs([child], timeout=60)
    os.close(ours)
    os.close(theirs)
    assert survivors == []


WATCHER = """
import asyncio
from radixfleet.lifeline import exit_with_parent

async def main():
    watching = asyncio.create_task(exit_with_parent(0.01))
    await asyncio.sleep(0)  # it has looked who the parent is
    print("watching", flush=True)
    await watching

asyncio.run(main())
"""
STARTER = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WATCHER!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


async def test_a_child_that_watches_its_parent_ends_after_it_though_nobody_has_reaped_that_one() -> None:
    """A raylet is killed where no init reaps it: a zombie is no parent."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        await until(lambda: not survivors([child]), "the child has ended", timeout_s=30)
        assert parent.returncode is None, "not reaped so far"

"""How the runs with other people's software end what they start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from tests.interop.case import Case, Context
from tests.interop.engines import process
from tests.interop.run import _try
from tests.support.waiting import wait_until

CHILD = """
import pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])

def told(*_):
    (folder / "told").touch()
    while not (folder / "may-end").exists():
        time.sleep(0.01)
    sys.exit()

signal.signal(signal.SIGTERM, told)
grandchild = subprocess.Popen(["sleep", "600"])
(folder / "started.new").write_text(str(grandchild.pid))
(folder / "started.new").rename(folder / "started")
while True:
    signal.pause()
"""
RUN = """
import signal, sys
from pathlib import Path
from tests.interop.engines import process

folder = Path(sys.argv[1])
with process([sys.executable, "-c", sys.argv[2], str(folder)], folder / "log"):
    while True:
        signal.pause()
"""


def test_sigterm_ends_all_that_was_started_however_often_it_comes(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), CHILD])
    try:
        wait_until((tmp_path / "started").exists, lambda: "the process runs")
        grandchild = int((tmp_path / "started").read_text())
        run.send_signal(signal.SIGTERM)
        wait_until((tmp_path / "told").exists, lambda: "the process was told to end")
        run.send_signal(signal.SIGTERM)
        (tmp_path / "may-end").touch()
        assert run.wait(60) == 128 + signal.SIGTERM
        wait_until(lambda: not _runs(grandchild), lambda: "what the process started has ended")
    finally:
        run.kill()
        run.wait()


def _runs(pid: int) -> bool:
    """A process that nobody has waited for is gone as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_who_is_told_to_end_afterwards_ends_as_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with process(["sleep", "600"], tmp_path / "log"), process(["sleep", "600"], tmp_path / "other") as other:
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert other.returncode == -signal.SIGTERM


def test_a_client_whose_answer_is_nothing_like_it_should_be_fails_alone() -> None:
    def ask(_: Context) -> str:
        return str(cast("dict[str, Any]", {})["choices"])

    assert _try(Case("x", "X", "chats", ask), cast("Context", None)) == (False, "KeyError: 'choices'")

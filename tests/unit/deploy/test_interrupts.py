"""Ctrl-C in the first moment of the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.interrupts import ending_quietly
from tests.support.waiting import wait_until

SLOW = """
import pathlib, time
pathlib.Path(__file__).with_name("reached").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("module", ["click", "grpc"], ids=["of the command", "of a subcommand"])
def test_ctrl_c_during_imports_is_quiet(tmp_path: Path, module: str) -> None:
    """They take a third of a second, and gave a traceback."""
    (tmp_path / f"{module}.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "workers"],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until((tmp_path / "reached").exists, lambda: "the import is under way")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")


def test_afterwards_it_is_an_exception_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ending_quietly():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_it_is_ignored_it_stays_so() -> None:
    """A shell starts jobs in the background so."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_quietly():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

"""`python -m tests.gpu.run` where stages fail, hang, break and find nothing: time on a GPU must not be lost."""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.gpu.run import Outcome, Stage, run_all, said_by, stages, summary


def stage(name: str, source: str, limit_s: float = 60.0) -> Stage:
    return Stage(name, (sys.executable, "-c", source), limit_s)


HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
"""In a child that holds the pipe, as a test's worker would."""


def ran(*planned: Stage, seconds: float = 300.0) -> dict[str, Outcome]:
    outcomes = run_all(planned, dict(os.environ), time.monotonic() + seconds)
    return {outcome.stage.name: outcome for outcome in outcomes}


def test_no_stage_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = ran(
        stage("fails", "print('FAILED tests/x.py::test_y - AssertionError'); raise SystemExit(1)"),
        stage("breaks", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        stage("hangs", HANGS, limit_s=2.0),
        stage("empty", "raise SystemExit(5)"),
        stage("passes", "print('3 passed')"),
    )
    assert [outcome.said for outcome in outcomes.values()] == [
        "failed (exit code 1)",
        "ended by SIGSEGV",
        "out of time after 2 s",
        "nothing selected",
        "passed",
    ]
    assert [outcome.is_fine for outcome in outcomes.values()] == [False, False, False, True, True]
    assert "3 passed" in capfd.readouterr().out
    lines = summary(list(outcomes.values())).splitlines()
    assert lines[-1] == "FAILED tests/x.py::test_y - AssertionError"
    assert [line.split()[0] for line in lines[2:-1]] == list(outcomes)


def test_the_budget_is_kept() -> None:
    outcomes = ran(stage("hangs", HANGS), stage("late", "print('never')"), seconds=6.0)
    assert outcomes["hangs"].said.startswith("out of time after")
    assert outcomes["late"].said == "not begun: no time left"


def test_the_shortest_way_to_a_token_comes_first_and_figures_before_what_takes_long() -> None:
    names = [each.name for each in stages([])]
    assert names[0] == "runner"
    assert names.index("layers") < names.index("figures") < names.index("layer figures") < names.index("attention")
    assert not any("figures" in each.name for each in stages(["-k", "graphs"]))
    assert all(each.command[-2:] == ("-k", "graphs") for each in stages(["-k", "graphs"]))


def test_what_exit_codes_say() -> None:
    assert [said_by(code) for code in (0, 1, 5, -9)] == [
        "passed",
        "failed (exit code 1)",
        "nothing selected",
        "ended by SIGKILL",
    ]

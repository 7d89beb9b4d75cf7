"""What `radixfleet bench fleet` tells of rates: asked for, sent and answered are three figures, each with its name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.bench.fleet import Demand, Target
from deploy.bench.fleet_results import Run, as_object, facts, show
from deploy.commands.bench import bench
from loadtest.driver import Driven
from loadtest.statistics import Objective, summarize
from loadtest.tokens import TokenSource
from loadtest.workloads import Arrival
from tests.support.outcomes import outcome, result

TARGET = Target("min_cost", ("w0", "w1"), 1000, 250, 4096)


def run(*moments_s: float) -> Run:
    """Requests at these moments, all answered 1.5 s later."""
    source = TokenSource(250, 0)
    arrivals = [Arrival(at_s, (), 11, 0, source) for at_s in moments_s]
    return Run(TARGET, arrivals, Driven(result([outcome(at_s) for at_s in moments_s]), 0.0, 0.0))


def told(demand: Demand, *moments_s: float) -> tuple[str, dict[str, float | None]]:
    """The line for people and the object for scripts."""
    one = run(*moments_s)
    summary = summarize(one.driven.result, Objective())
    return facts(demand, one)["requests"], as_object(demand, [one], [summary])["runs"][0]["rates"]


def test_three_rates_have_three_names() -> None:
    line, rates = told(Demand("shared-prefix", 3, rate=2.0), 0.0, 0.5, 1.5)
    assert "sent at 2 a second (asked for: 2, at random moments)" in line
    assert rates == {"asked_per_s": 2.0, "sent_per_s": 2.0, "answered_per_s": pytest.approx(1.0)}


@pytest.mark.parametrize(("rate", "asked"), [(None, 8.0), (5.0, 5.0)])
def test_what_was_asked_for_is_the_users_or_the_default(rate: float | None, asked: float) -> None:
    assert told(Demand("shared-prefix", 2, rate=rate), 0.0, 1.0)[1]["asked_per_s"] == asked


def test_a_trace_has_times_of_its_own_and_a_crowd_none() -> None:
    line, rates = told(Demand("trace.jsonl", 2), 0.0, 1.0)
    assert (rates["asked_per_s"], rates["sent_per_s"]) == (None, 2.0)
    assert "asked" not in line
    line, rates = told(Demand("shared-prefix", 2, rate=4.0), 0.0, 0.0)
    assert (rates["asked_per_s"], rates["sent_per_s"]) == (None, None)
    assert "sent all at once" in line


def test_the_tables_name_them(capsys: pytest.CaptureFixture[str]) -> None:
    one = run(0.0, 0.5, 1.5)
    show(Demand("shared-prefix", 3, rate=2.0), [one], [summarize(one.driven.result, Objective())])
    out = capsys.readouterr().out
    assert "sent at 2 a second (asked for: 2" in out
    heads = next(line for line in out.splitlines() if line.startswith("a second")).split()
    assert "answered" in heads
    assert "requests" not in heads


def test_work_is_not_known_where_no_worker_is(capsys: pytest.CaptureFixture[str]) -> None:
    one = run(0.0, 0.5)
    one = dataclasses.replace(one, driven=Driven(result([outcome(0.0, worker=-1)]), 0.0, 0.0))
    show(Demand("shared-prefix", 2), [one], [summarize(one.driven.result, Objective())])
    lines = capsys.readouterr().out.splitlines()
    place = next(place for place, line in enumerate(lines) if "max/mean" in line)
    assert lines[place + 1].split()[-3] == "-", "before busy and failed"


def test_figures_are_told_though_the_page_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def measured() -> Run:
        return run(0.0, 1.0)

    monkeypatch.setattr("deploy.commands.bench_fleet._works", lambda *_: iter([measured()]))
    outcome = CliRunner().invoke(bench, ["fleet", "--json", "--report", str(tmp_path / ("x" * 300))])
    assert (outcome.exit_code, "cannot write the report" in outcome.stderr) == (1, True)
    assert json.loads(outcome.stdout)["runs"][0]["requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--speed", "2"], "--speed does nothing here: it is for traces, and shared-prefix is generated"),
        (["--id-tokens", "64"], "--id-tokens does nothing here"),
        (["--workload", "published", "--rate", "2"], "--rate does nothing here: published comes all at once"),
        (["--workload", "t.jsonl", "--rate", "2", "--speed", "2"], "--speed does nothing here: --rate says how fast"),
        (["--kv-tokens", "1000"], "--kv-tokens does nothing here: it needs --simulate or --http"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments: list[str], why: str) -> None:
    outcome = CliRunner().invoke(bench, ["fleet", *arguments])
    assert outcome.exit_code == 2
    assert why in " ".join(outcome.output.split())

"""`radixfleet lab` as a script sees it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.commands.lab import lab
from deploy.lab.comparison import Run, compare
from loadtest.statistics import Objective, summarize


def test_compares_policies_and_writes_a_report(tmp_path: Path):
    page = tmp_path / "r.html"
    arguments = [
        "--workers",
        "2",
        "--requests",
        "60",
        "--policy",
        "min_cost,round_robin",
        "--json",
        "--report",
        str(page),
    ]
    result = CliRunner().invoke(lab, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [each["policy"] for each in found["policies"]] == ["min_cost", "round_robin"]
    assert all(0 <= each["hit_rate"] <= each["ceiling"] and not each["failed"] for each in found["policies"])
    assert "min_cost" in page.read_text()


def test_replays_a_trace(tmp_path: Path):
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 5, "hash_ids": [i % 3, 9 + i]} for i in range(12)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(lab, ["--workload", str(trace), "--workers", "2", "--policy", "min_cost", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 12


def _trace_of(path: Path, *input_lengths: int) -> str:
    lines = [
        {"timestamp": 100 * i, "input_length": tokens, "output_length": 5, "hash_ids": list(range(-(-tokens // 512)))}
        for i, tokens in enumerate(input_lengths)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_trace_comes_as_fast_as_gives_the_fleet_the_load(tmp_path: Path):
    trace = _trace_of(tmp_path / "t.jsonl", *[600] * 12)
    for workers in ("1", "4"):
        arguments = ["--workload", trace, "--workers", workers, "--load", "0.8", "--policy", "min_cost", "--json"]
        facts = json.loads(CliRunner().invoke(lab, arguments).stdout)["facts"]
        assert facts["offered load"].startswith("0.80 of "), facts


def test_a_trace_that_is_one_request_or_comes_at_once_has_no_rate(tmp_path: Path):
    one, many = _trace_of(tmp_path / "one.jsonl", 700), _trace_of(tmp_path / "many.jsonl", *[700] * 5)
    for arguments in ([one], [one, "--load", "0.5"], [many, "--speed", "1e15"]):
        result = CliRunner().invoke(lab, ["--workload", *arguments, "--policy", "min_cost"])
        assert result.exit_code == 0, result.output
        assert result.stdout.count("at once") == 2, result.stdout
        assert "inf" not in result.stdout


def test_where_nothing_is_answered_there_are_no_times(tmp_path: Path):
    trace = _trace_of(tmp_path / "long.jsonl", 200_000)
    page = tmp_path / "r.html"
    result = CliRunner().invoke(lab, ["--workload", trace, "--policy", "min_cost", "--report", str(page)])
    printed = result.stdout
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "Error: no request was answered")
    assert page.read_text().count("<td>-</td>") == 8
    times = printed.partition("TTFT s")[2].splitlines()[1]
    assert times.split() == ["min_cost", *"-------"]
    assert "min_cost: the prompt has 200000 tokens" in printed
    result = CliRunner().invoke(lab, ["--workload", trace, "--policy", "min_cost", "--json"])
    assert json.loads(result.stdout)["policies"][0]["failed"] == 1
    assert (result.exit_code, "no request was answered: the prompt has 200000 tokens" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "zipf", "--speed", "2"], "--speed is for traces"),
        (["--workload", "zipf", "--rate", "2", "--load", "0.5"], "not by --rate and --load"),
        (["--workload", "published", "--load", "0.5"], "comes all at once: give no --load"),
        (["--workload", "TRACE", "--speed", "2", "--load", "0.5"], "not by --load and --speed"),
        (["--workload", "TRACE", "--rate", "2", "--load", "0.5", "--speed", "2"], "not by --rate, --load and --speed"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, arguments: list[str], said: str):
    trace = _trace_of(tmp_path / "t.jsonl", 600)
    result = CliRunner().invoke(lab, [each.replace("TRACE", trace) for each in arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--policy", "min_cost,round_robin,min_cost"]], ids="".join)
def test_what_makes_no_experiment_is_refused(arguments: list[str]):
    result = CliRunner().invoke(lab, ["--requests", "4", *arguments])
    assert result.exit_code == 2
    assert "named twice" in result.output or "--seed" in result.output


def test_a_fleet_that_waits_for_years_takes_no_longer():
    arguments = ["--requests", "4", "--policy", "min_cost", "--workers", "2", "--json"]
    found = json.loads(CliRunner().invoke(lab, ["--rate", "1e-7", *arguments]).stdout)
    (ours,) = found["policies"]
    assert ours["duration_s"] > 1e6
    assert ours["failed"] == 0


def test_what_is_too_slow_for_the_clock_is_refused_with_the_bound():
    result = CliRunner().invoke(lab, ["--requests", "4", "--policy", "min_cost", "--rate", "1e-12"])
    assert result.exit_code == 2
    assert "1e+09 s" in " ".join(result.output.split())


def test_compares_what_routers_know_and_how_many_there_are(tmp_path: Path):
    """And each row says what hits were lost to."""
    page = tmp_path / "r.html"
    arguments = [
        *("--workload", "working-set-1.5", "--workers", "2", "--requests", "40", "--kv-tokens", "30000"),
        *("--policy", "min_cost", "--truth", "deltas,receipts", "--routers", "1,2"),
    ]
    result = CliRunner().invoke(lab, [*arguments, "--json", "--report", str(page)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["policies"]
    names = [each["policy"] for each in found]
    assert names == ["1 router, deltas", "1 router, receipts", "2 routers, deltas", "2 routers, receipts"]
    assert all(sum(each["split"].values()) == pytest.approx(1.0) for each in found)
    assert all(each["split"]["gone"] > 0 for each in found)
    assert all(word in page.read_text() for word in ("lost to index", "to routing", "gone", "2 routers, receipts"))
    printed = CliRunner(env={"COLUMNS": "60"}).invoke(lab, arguments).stdout
    assert all(word in printed for word in ("hit rate", "index", "routing", "gone", "new", "2 routers, receipts"))
    assert "…" not in printed, "a narrow terminal breaks lines, and cuts no number"


def test_each_of_several_values_is_checked():
    for arguments, said in ((["--routers", "1,0"], "0"), (["--truth", "deltas,gossip"], "gossip")):
        result = CliRunner().invoke(lab, arguments)
        assert result.exit_code == 2
        assert said in result.output


def test_an_unknown_workload_or_policy_is_a_usage_error_that_says_what_there_is():
    for arguments, said in ((["--workload", "nope"], "Mooncake"), (["--policy", "nope"], "round_robin")):
        result = CliRunner().invoke(lab, arguments)
        assert result.exit_code == 2
        assert said in result.output


def test_several_seeds_say_how_sure_a_difference_is():
    arguments = ["--workers", "2", "--requests", "20", "--policy", "min_cost,round_robin", "--seed", "5"]
    printed = CliRunner().invoke(lab, [*arguments, "--seeds", "3"])
    assert printed.exit_code == 0, printed.output
    assert all(word in printed.stdout for word in ("3 seeds", "over best", "±"))
    found = json.loads(CliRunner().invoke(lab, [*arguments, "--seeds", "3", "--json"]).stdout)
    assert [each["seed"] for each in found["seeds"]] == [5, 6, 7]
    assert found["seeds"][0]["policies"] == found["policies"]
    assert found["seeds"][1]["policies"] != found["policies"], "another seed is another draw"
    assert {each["policy"] for each in found["over_seeds"]} == {"min_cost", "round_robin"}
    assert "seeds" not in json.loads(CliRunner().invoke(lab, [*arguments, "--json"]).stdout)


def test_what_fails_on_a_later_seed_alone_is_told(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def fails_later(*arguments):
        runs = compare(*arguments)
        asked.append("a seed")
        return runs if len(asked) == 1 else [_with_a_failure(run) for run in runs]

    monkeypatch.setattr("deploy.commands.lab.compare", fails_later)
    printed = CliRunner().invoke(lab, ["--workers", "2", "--requests", "20", "--policy", "min_cost", "--seeds", "3"])
    assert printed.exit_code == 0, printed.output
    assert "min_cost: the worker fell over" in printed.stdout
    over_seeds = printed.stdout.partition("3 seeds")[2].splitlines()
    assert over_seeds[0].split()[-1] == "failed"
    assert over_seeds[1].split()[-1] == "2"


def _with_a_failure(run: Run) -> Run:
    first, *others = run.result.outcomes
    result = replace(run.result, outcomes=[replace(first, error="the worker fell over"), *others])
    return Run(result, summarize(result, Objective()))


def test_figures_are_told_though_the_page_cannot_be_written(tmp_path: Path):
    arguments = ["--requests", "4", "--policy", "min_cost", "--json", "--report", str(tmp_path / ("x" * 300))]
    result = CliRunner().invoke(lab, arguments)
    assert (result.exit_code, "cannot write the report" in result.stderr) == (1, True)
    assert json.loads(result.stdout)["policies"]

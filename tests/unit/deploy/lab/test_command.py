"""`radixfleet lab` as a script sees it."""

import json
from pathlib import Path

from click.testing import CliRunner

from deploy.commands.lab import lab


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


def test_an_unknown_workload_or_policy_is_a_usage_error_that_says_what_there_is():
    for arguments, said in ((["--workload", "nope"], "Mooncake"), (["--policy", "nope"], "round_robin")):
        result = CliRunner().invoke(lab, arguments)
        assert result.exit_code == 2
        assert said in result.output

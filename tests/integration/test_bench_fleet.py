"""`radixfleet bench fleet` as a user calls it: on a fleet that runs, and on simulated ones that it starts itself."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys

import pytest
from click.testing import CliRunner

from deploy.commands.bench import bench
from tests.support.router_fixture import running_fleet

SHORT = ("--lengths", "0.05", "--requests", "64", "--rate", "200")


async def bench_fleet(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.cli", "bench", "fleet", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_on_a_fleet_that_runs(tmp_path):
    report = tmp_path / "report.html"
    async with running_fleet(2) as fleet:
        code, out, err = await bench_fleet(
            "--endpoint", fleet.router.address, *SHORT, "--json", "--report", str(report)
        )
    assert code == 0, err
    assert " requests over " in err, "who waits knows for how long"
    (run,) = json.loads(out)["runs"]
    assert (run["policy"], run["requests"], run["failed"]) == ("min_cost", 64, 0)
    assert 0 < run["hit_rate"] <= run["reachable_rate"] <= run["ceiling"]
    assert len(run["work_shares"]) == 2
    assert "Radixfleet load test" in report.read_text()


async def test_ctrl_c_ends_the_load_and_shows_what_there_is():
    async with running_fleet(1) as fleet:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.cli", "bench", "fleet", "--endpoint", fleet.router.address),
            *("--lengths", "0.05", "--requests", "400", "--rate", "40"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        while b" of 400, 0 failed" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    assert process.returncode == 130
    assert "TTFT" in out.decode()
    assert re.search(r"min_cost: stopped after \d+ s; \d+ of 400 requests had ended", out.decode())


async def test_over_http_side_by_side(tmp_path):
    report = tmp_path / "report.html"
    async with running_fleet(2, http_port=0) as fleet:
        url = f"http://127.0.0.1:{fleet.router.http_port}"
        served = ("--http", f"first={url}", "--http", f"{url}/v1", "--workers", "2", "--vocab-size", "250")
        code, out, err = await bench_fleet(*served, *SHORT, "--json", "--report", str(report))
        alone = await bench_fleet("--http", url, *SHORT, "--model", "none")
        worded = await bench_fleet("--http", url, "--workers", "2", "--as-text", *SHORT, "--json")
    assert code == 0, err
    told = json.loads(out)
    names = [(run["policy"], run["requests"], run["failed"]) for run in told["runs"]]
    assert names == [("first", 64, 0), (url.removeprefix("http://"), 64, 0)]
    for run in told["runs"]:
        assert 0 < run["hit_rate"] <= run["ceiling"]
        assert run["work_shares"] == [], "HTTP tells of no workers"
    assert "first" in report.read_text()
    (run,) = json.loads(worded[1])["runs"]
    assert (run["failed"], 0 < run["hit_rate"] <= run["ceiling"]) == (0, True)
    assert (alone[0], "serves fake-model: name one with --model" in alone[2]) == (2, True)


async def test_where_nothing_is_answered_the_command_fails():
    """After the figures: they tell why."""
    async with running_fleet(1) as fleet:
        code, out, err = await bench_fleet("--endpoint", fleet.router.address, *SHORT, "--timeout", "0.000001")
        seed = await bench_fleet("--endpoint", fleet.router.address, "--seed", "-1")
    assert (code, err.splitlines()[-1]) == (1, "Error: no request was answered"), err
    assert "failed" in out
    assert "Traceback" not in err
    assert (seed[0], "--seed" in seed[2], "Traceback" in seed[2]) == (2, True, False)


async def test_nobody_there_is_an_error_in_one_line():
    code, out, err = await bench_fleet("--http", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "lists no models" in err
    assert "Traceback" not in err


async def test_what_the_model_cannot_take_is_refused_with_a_way_out():
    async with running_fleet(1) as fleet:
        code, _, err = await bench_fleet("--endpoint", fleet.router.address, "--lengths", "1000")
        assert code == 2
        assert "longer than the model's context" in err
        assert "Shorten them: --lengths 819" in err
        code, _, err = await bench_fleet("--endpoint", fleet.router.address, "--workload", "nothing")
        assert code == 2
        assert "there are shared-prefix" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--simulate", "2", "--policy", "best"), "no policy is called 'best'"),
        (("--policy", "sglang"), "--policy does nothing here: it needs --simulate"),
        (("--simulate", "2", "--endpoint", "127.0.0.1:1"), "--endpoint does nothing here"),
        (("--simulate", "2", "--http", "http://h:1"), "--http does nothing here"),
        (
            ("--http", "http://h:1", "--endpoint", "127.0.0.1:1"),
            "--endpoint does nothing here: --http says whom to ask",
        ),
        (("--workers", "2"), "--workers does nothing here: it needs --http"),
        (("--as-text",), "--as-text does nothing here: it needs --http"),
        (("--http", "h:1"), "write http://HOST:PORT, or NAME=http://HOST:PORT; got 'h:1'"),
        (("--report", "/nowhere/report.html"), "cannot write to the folder /nowhere"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent_or_started(arguments, complaint):
    outcome = CliRunner().invoke(bench, ["fleet", *arguments])
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert complaint in outcome.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_on_simulated_fleets():
    code, out, err = await bench_fleet(
        "--simulate", "2", "--policy", "min_cost,round_robin", *SHORT, "--kv-tokens", "4096"
    )
    assert code == 0, err
    assert "over round_robin" in out
    assert out.count("us of CPU a request") == 2

"""`radixfleet bench engine`: its workload, its arithmetic, and small real runs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from deploy.bench.chunks import NothingBetween
from deploy.bench.chunks import measure as measure_chunks
from deploy.bench.overlap import Round, compare, summarize
from deploy.bench.tables import chunks_table, comparison_table
from deploy.bench.workload import Workload
from deploy.commands.bench import bench
from radixfleet.errors import InvalidRequest
from tests.support.tiny_model import tiny_model
from worker.engine.config import EngineConfig
from worker.runner.sim import CostModel, SimRunnerConfig

SMALL = Workload(num_requests=12, num_prefixes=3, prefix_tokens=64, unique_tokens=16, new_tokens=(4, 9))
ENGINE = EngineConfig(
    runner=SimRunnerConfig(
        kv_tokens=4096,
        page_size=16,
        max_running_requests=4,
        chunked_prefill_size=64,
        max_context_tokens=1024,
        cost=CostModel(step_s=0.003, prefill_token_s=1e-4),
    ),
    log_level="error",
)


def a_round(*, overlap: bool, duration_s: float, bubble_s: float) -> Round:
    return Round(
        overlap=overlap,
        duration_s=duration_s,
        output_tokens=100,
        discarded_tokens=2,
        scheduling_s=0.004,
        engine_cpu_s=0.008,
        step_s=[0.01, 0.01, 0.03, 0.01],
        bubble_s=[bubble_s, bubble_s, 3 * bubble_s, 0.0],
    )


class TestWorkload:
    """Prompts from a seed."""

    def test_prefixes_are_shared_and_tails_are_not(self) -> None:
        prompts = SMALL.prompts(seed=1)
        assert len(prompts) == 12
        assert len({prompt.token_ids[:64].tobytes() for prompt in prompts}) == 3
        assert len({prompt.token_ids[64:].tobytes() for prompt in prompts}) == 12
        assert {len(prompt.token_ids) for prompt in prompts} == {80}
        assert all(4 <= prompt.max_new_tokens <= 9 for prompt in prompts)

    def test_a_seed_names_a_workload(self) -> None:
        one, same, other = (SMALL.prompts(seed)[5].token_ids for seed in (1, 1, 2))
        assert np.array_equal(one, same)
        assert not np.array_equal(one, other)


class TestFigures:
    """What is made of the rounds."""

    def test_means_medians_and_shares(self) -> None:
        rounds = [a_round(overlap=overlap, duration_s=2.0, bubble_s=0.001) for overlap in (True, False, False, True)]
        figures = summarize("x", rounds).overlapped
        assert (figures.steps, figures.discarded_tokens) == (8, 4)
        assert figures.step_ms == pytest.approx(10.0)
        assert figures.bubble_p50_us == pytest.approx(1000.0)
        assert figures.bubble_mean_us == pytest.approx(1250.0)
        assert figures.bubble_p50_percent == pytest.approx(100 * 1 / 11)
        assert figures.bubble_percent == pytest.approx(100 * 5 / 65)
        assert (figures.scheduling_us, figures.engine_cpu_us) == (pytest.approx(1000.0), pytest.approx(2000.0))

    def test_the_speedup_is_that_of_the_median_pair(self) -> None:
        durations = [(2.0, 2.2), (2.0, 2.4), (2.0, 9.0)]
        rounds = [
            a_round(overlap=overlap, duration_s=duration_s, bubble_s=0.0)
            for fast, slow in durations
            for overlap, duration_s in ((True, fast), (False, slow))
        ]
        assert summarize("x", rounds).speedup == pytest.approx(1.2)

    def test_six_pairs_say_how_sure_the_speedup_is(self) -> None:
        durations = [(2.0, 2.0 * ratio) for ratio in (1.3, 1.0, 1.2, 0.9, 1.1, 1.4)]
        rounds = [
            a_round(overlap=overlap, duration_s=duration_s, bubble_s=0.0)
            for fast, slow in durations
            for overlap, duration_s in ((True, fast), (False, slow))
        ]
        comparison = summarize("x", rounds)
        assert comparison.speedup_interval == pytest.approx((0.9, 1.4))
        assert summarize("x", rounds[:-2]).speedup_interval is None
        console = Console(width=80)
        with console.capture() as printed:
            console.print(comparison_table(comparison))
        assert "95 %: 0.90 to 1.40" in printed.get()

    def test_the_table_has_both_loops(self) -> None:
        rounds = [a_round(overlap=overlap, duration_s=2.0, bubble_s=0.001) for overlap in (True, False)]
        console = Console(width=80)
        with console.capture() as printed:
            console.print(comparison_table(summarize("a device", rounds)))
        assert "overlapped" in printed.get()
        assert "1.00" in printed.get()


async def test_both_loops_do_the_same_work() -> None:
    told: list[str] = []
    comparison = await compare("sim", ENGINE, SMALL, 1, told.append)
    expected_tokens = sum(prompt.max_new_tokens for prompt in SMALL.prompts(seed=0))
    for figures in (comparison.overlapped, comparison.serial):
        assert figures.steps > 12 * 6 / 4
        assert figures.step_ms >= 3.0
        assert 0.0 <= figures.bubble_percent < 100.0
        assert figures.discarded_tokens == 0, "requests that end by length take no extra step"
        assert 0.0 < figures.tokens_per_s < expected_tokens / (figures.steps * 0.003)
    assert comparison.serial.bubble_p50_us > 0.0
    assert len(told) == 4


async def test_a_chunk_size_is_measured_on_a_running_request() -> None:
    figures = await measure_chunks(64, ENGINE, prompt_tokens=256, num_prompts=2)
    assert figures.chunk_tokens == 64
    assert 3.0 <= figures.inter_token_p50_ms <= figures.inter_token_p99_ms <= figures.inter_token_max_ms
    assert figures.ttft_ms >= 256 * 0.1 + 4 * 3
    console = Console(width=80)
    with console.capture() as printed:
        console.print(chunks_table([figures], 256))
    assert "TTFT" in printed.get()


@pytest.mark.parametrize(("sizes", "why"), [("128,many", "not a valid integer"), ("0", "x>=1")])
def test_chunk_sizes_are_checked_before_anything_is_loaded(sizes: str, why: str) -> None:
    outcome = CliRunner().invoke(bench, ["engine", "--chunk-sizes", sizes])
    assert outcome.exit_code == 2
    assert why in outcome.output


async def test_an_answer_that_ends_before_the_prompts_come_tells_nothing_of_them() -> None:
    short = msgspec.structs.replace(ENGINE.runner, max_context_tokens=40)
    with pytest.raises(NothingBetween, match="a longer context"):
        await measure_chunks(64, msgspec.structs.replace(ENGINE, runner=short), prompt_tokens=16, num_prompts=1)


async def test_a_prompt_that_does_not_fit_ends_the_measurement() -> None:
    with pytest.raises(InvalidRequest):
        await measure_chunks(64, ENGINE, prompt_tokens=2000, num_prompts=1)


@pytest.mark.parametrize("options", [(), ("--chunk-sizes", "64")])
def test_an_engine_that_cannot_load_is_told_in_one_line(options: tuple[str, ...]) -> None:
    arguments = ["engine", "--runner", "torch", "--model", str(tiny_model()), "--device", "cuda:97", *options]
    outcome = CliRunner().invoke(bench, arguments)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.splitlines()[-1].startswith("Error: ")
    assert "cuda:97" in outcome.stderr.splitlines()[-1]

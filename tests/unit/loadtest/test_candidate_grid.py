"""The grid of candidates for the routing score (`tests.bench.candidate_grid`): what it keeps and compares."""

from pathlib import Path

import pytest

from deploy.lab.comparison import Variant, compare
from deploy.lab.experiment import Experiment
from deploy.lab.simulation import Setup, prepare
from loadtest.statistics import Objective
from router.policies import make_policy
from tests.bench.candidate_grid import KV_TOKENS, Cell, Cells, Spot, ratios, standings

SPOT = Spot("hot-prefix", workers=2, load=1.1, seed=1, requests=12)


def cell(policy: str, seed: int, ttft_s: float, tokens_per_s: float) -> Cell:
    spot = Spot("hot-prefix", 2, 1.1, seed, 12)
    return Cell(spot, policy, ttft_s, ttft_s, 1.0, tokens_per_s, 0.5, 0.5)


def test_a_cell_has_the_steady_rate_for_one_long_answer_decides_that_of_the_whole_run(tmp_path: Path) -> None:
    policy, found = make_policy("min_cost"), []
    Cells(tmp_path).run(SPOT, [policy], found.append)
    experiment = Experiment("hot-prefix", workers=2, load=1.1, kv_tokens=KV_TOKENS, requests=12, seed=1)
    variant = Variant("min_cost", policy, Setup(experiment.presets(), seed=1))
    summary = compare([variant], prepare(experiment.arrivals()), Objective())[0].summary
    assert summary.steady_output_tokens_per_s != pytest.approx(summary.output_tokens_per_s)
    assert found[0].steady_output_tokens_per_s == summary.steady_output_tokens_per_s
    assert found[0].latency_s == summary.latency_s.mean


def test_a_cell_that_is_kept_is_not_run_again(tmp_path: Path) -> None:
    policy = make_policy("round_robin")
    Cells(tmp_path).run(SPOT, [policy], lambda _: None)
    again = Cells(tmp_path)
    assert not again.lacking(SPOT, [policy])
    assert [each.policy for each in again.of(["round_robin"], [SPOT])] == ["round_robin"]


def test_ratios_are_to_the_best_in_each_figure_by_seeds_that_all_have() -> None:
    cells = [cell("a", 1, 1.0, 90), cell("b", 1, 2.0, 100), cell("a", 2, 9.0, 10)]
    (standing,) = standings(cells).values()
    assert ratios(standing, "a") == (1.0, 0.9)
    assert ratios(standing, "b") == (2.0, 1.0)
    assert standing["a"].seeds == 1

"""Several seeds: means, and how sure their differences are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.lab.repetition import paired, standard_error, standings
from deploy.lab.tables import seeds_table
from loadtest.statistics import Percentiles, Summary
from tests.support.lab_fleet import figures, fleet, run, shared


def test_a_difference_that_every_seed_has_is_sure_however_far_the_seeds_are_apart() -> None:
    ratio, error = paired([1.1, 11.0, 110.0], [1.0, 10.0, 100.0])
    assert ratio == pytest.approx(1.1)
    assert error == pytest.approx(0.0, abs=1e-9)


def test_a_difference_of_one_seed_is_not() -> None:
    ratio, error = paired([1.0, 1.0, 1.0, 1.4], [1.0, 1.0, 1.0, 1.0])
    assert ratio == pytest.approx(1.1)
    assert error == pytest.approx(0.1)


def test_nothing_over_nothing_is_one_and_one_seed_has_no_error() -> None:
    assert paired([0.0], [0.0]) == (1.0, 0.0)
    assert standard_error([3.0]) == 0.0


def test_the_best_of_all_seeds_is_what_the_others_are_set_against() -> None:
    by_seed: list[list[Summary]] = []
    for seed in range(3):
        arrivals = shared(groups=6, per_group=4, prefix=4096, rate=20.0)
        by_seed.append([figures(run(arrivals, fleet(2), name, seed=seed)) for name in ("round_robin", "min_cost")])
    plain, ours = standings(by_seed)
    assert (plain.policy, ours.policy) == ("round_robin", "min_cost")
    assert (ours.ttft_over_best, ours.ttft_over_best_error) == (1.0, 0.0)
    assert plain.ttft_over_best > 1.2
    assert plain.hit_rate < ours.hit_rate
    assert plain.ttft_s == pytest.approx(sum(seed[0].ttft_s.mean for seed in by_seed) / 3)


def test_the_best_stands_first_also_where_another_is_ahead_of_it_on_most_seeds() -> None:
    any_figures = figures(run(shared(groups=2, per_group=2, prefix=256, rate=20.0), fleet(1), "min_cost", seed=0))
    by_seed = [
        [replace(any_figures, policy=policy, ttft_s=Percentiles(ttft_s, 0, 0, 0), failed=2) for policy, ttft_s in seed]
        for seed in (
            [("often", 0.5), ("best", 1.0)],
            [("often", 0.5), ("best", 1.0)],
            [("often", 12.0), ("best", 10.0)],
        )
    ]
    often, best = standings(by_seed)
    assert best.ttft_over_best == 1.0 > often.ttft_over_best
    table = seeds_table([often, best], num_seeds=3)
    assert list(table.columns[0].cells) == ["best", "often"]
    assert list(table.columns[-1].cells) == ["6", "6"]

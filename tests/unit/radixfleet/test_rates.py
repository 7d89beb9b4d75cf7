"""Rates are differences of totals, and nothing else."""

import pytest

from radixfleet.rates import (
    PromptTokens,
    Recent,
    Totals,
    hit_split,
    increase,
    joined,
    prompt_increase,
    prompts_joined,
    quantile,
    rates,
    ttft_bucket,
)
from radixfleet.telemetry import TTFT_BUCKETS_S
from tests.support.fleet_reports import recent, totals


def test_the_increase_of_totals_is_taken_field_by_field():
    before = Totals(requests=3, steps=5, step_s=1.5, ttft_counts=(1, 2))
    now = Totals(requests=5, steps=9, step_s=2.0, cached_tokens=7, ttft_counts=(1, 4))
    grown = increase(now, before)
    assert (grown.requests, grown.steps, grown.step_s, grown.cached_tokens) == (2, 4, 0.5, 7)
    assert grown.ttft_counts == (0, 2)
    assert joined(before, grown) == now


def test_totals_that_fell_began_again():
    assert increase(Totals(requests=2, steps=1), Totals(requests=9, steps=80)) == Totals(requests=2, steps=1)


def test_totals_with_other_buckets_still_give_an_increase():
    grown = increase(Totals(requests=4, ttft_counts=(1, 1, 1)), Totals(requests=1, ttft_counts=(1,)))
    assert grown.requests == 3
    assert grown.ttft_counts == (1, 1, 1)


def test_prompt_tokens_join_and_part():
    one, other = PromptTokens(10, 9, 8, 7, 1), PromptTokens(5, 4, 3, 2, 1)
    assert prompts_joined(one, other) == PromptTokens(15, 13, 11, 9, 2)
    assert prompt_increase(prompts_joined(one, other), one) == other


def test_rates_of_ten_seconds():
    seen = rates(recent(10.0, ttft_s=0.09))
    assert seen.requests_per_s == pytest.approx(1.0)
    assert seen.prompt_tokens_per_s == pytest.approx(100.0)
    assert seen.output_tokens_per_s == pytest.approx(50.0)
    assert seen.hit_rate == pytest.approx(0.75)
    assert seen.bubble_share == pytest.approx(0.1)
    assert seen.busy_share == pytest.approx(0.09)
    assert seen.ttft_p50_s == pytest.approx(0.075)


def test_nothing_happened_is_not_a_rate_of_zero():
    seen = rates(Recent(10.0))
    assert (seen.hit_rate, seen.ttft_p50_s, seen.bubble_share) == (None, None, None)
    assert seen.output_tokens_per_s == 0.0


def test_a_stretch_of_no_length_has_no_speed():
    assert rates(Recent(0.0, totals())).output_tokens_per_s == 0.0


def test_the_split_of_prompt_tokens_makes_one():
    split = hit_split(PromptTokens(asked=1000, reachable=900, predicted=800, actual=750, mispredicted=70))
    assert split is not None
    assert (split.hit, split.workload, split.routing, split.index) == pytest.approx((0.75, 0.1, 0.1, 0.05))
    assert split.hit + split.workload + split.routing + split.index == pytest.approx(1.0)
    assert split.prediction_error == pytest.approx(0.07)
    assert hit_split(PromptTokens()) is None


def test_what_is_cached_beyond_whole_blocks_is_not_new_to_the_fleet():
    """The router reckons in blocks of 64, workers in pages: 880 of 1000 cached, of which 850 were known of."""
    split = hit_split(PromptTokens(asked=1000, reachable=850, predicted=850, actual=880, mispredicted=30))
    assert split is not None
    assert (split.hit, split.workload, split.routing, split.index) == pytest.approx((0.88, 0.12, 0.0, 0.0))


def test_what_a_busier_worker_holds_counts_only_beyond_what_was_cached():
    split = hit_split(PromptTokens(asked=1000, reachable=800, predicted=100, actual=200, mispredicted=100))
    assert split is not None
    assert (split.hit, split.workload, split.routing, split.index) == pytest.approx((0.2, 0.2, 0.6, 0.0))


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        (0.5, (0, 10, 0), 1.5),
        (0.5, (10, 10, 0), 1.0),
        (0.99, (0, 100, 0), 1.99),
        (0.5, (4, 0, 0), 0.5),
        (0.5, (0, 0, 3), 2.0),  # above the last bound: at least that
        (0.5, (0, 0, 0), None),
        (0.5, (), None),
    ],
)
def test_quantile(share, counts, expected):
    assert quantile(share, counts, (1.0, 2.0)) == (None if expected is None else pytest.approx(expected))


def test_each_time_to_first_token_has_a_bucket():
    counts = list(Totals().ttft_counts)
    for ttft_s in (0.0, *TTFT_BUCKETS_S, 1e9):
        counts[ttft_bucket(ttft_s)] += 1
    assert counts == [2, *[1] * len(TTFT_BUCKETS_S)]

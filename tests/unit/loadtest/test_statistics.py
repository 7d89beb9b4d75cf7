"""Figures of a run."""

import numpy as np
import pytest

from loadtest.statistics import Objective, Percentiles, summarize
from tests.support.outcomes import failed, outcome, result


class TestPercentiles:
    def test_are_values_that_occur(self):
        times = np.arange(1, 101, dtype=float)
        np.random.default_rng(0).shuffle(times)
        assert Percentiles.of(times) == Percentiles(mean=50.5, p50=50, p90=90, p99=99)

    def test_count_as_often_as_they_are_told(self):
        assert Percentiles.of(np.array([5.0, 1.0]), np.array([1, 9])) == Percentiles(mean=1.4, p50=1, p90=1, p99=5)

    @pytest.mark.parametrize("seed", range(5))
    def test_counted_is_the_same_as_repeated(self, seed: int):
        random = np.random.default_rng(seed)
        values, counts = random.random(30), random.integers(1, 9, 30)
        repeated = Percentiles.of(np.repeat(values, counts))
        counted = Percentiles.of(values, counts)
        assert (counted.p50, counted.p90, counted.p99) == (repeated.p50, repeated.p90, repeated.p99)
        assert counted.mean == pytest.approx(repeated.mean)

    def test_of_one_value_and_of_none(self):
        assert Percentiles.of(np.array([3.0])) == Percentiles(3.0, 3.0, 3.0, 3.0)
        assert Percentiles.of(np.array([])) == Percentiles(0.0, 0.0, 0.0, 0.0)


class TestObjective:
    @pytest.mark.parametrize(
        ("fields", "is_met"),
        [
            ({}, True),
            ({"first_token_s": 1.01}, False),
            ({"ended_s": 0.5 + 10 * 0.2 + 0.01}, False),
            ({"error": "lost"}, False),
            ({"output_tokens": 1, "ended_s": 0.5}, True),
        ],
    )
    def test_needs_an_early_first_token_and_a_steady_answer(self, fields: dict[str, object], is_met: bool):
        assert Objective(ttft_s=1.0, inter_token_s=0.2).is_met(outcome(**fields)) is is_met

    def test_is_not_met_by_what_never_began(self):
        assert not Objective().is_met(failed())


class TestSummary:
    def test_shares_are_of_the_prompt_tokens_of_requests_that_began(self):
        outcomes = [outcome(prompt_tokens=100), outcome(prompt_tokens=300, cached_tokens=150), failed()]
        summary = summarize(result(outcomes), Objective())
        assert (summary.hit_rate, summary.predicted_rate) == (200 / 400, 120 / 400)
        assert (summary.reachable_rate, summary.ceiling) == (140 / 400, 160 / 400)

    def test_predictions_too_high_and_too_low_do_not_make_up_for_each_other_by_the_request(self):
        outcomes = [outcome(predicted_tokens=192, cached_tokens=320), outcome(predicted_tokens=384, cached_tokens=320)]
        summary = summarize(result(outcomes), Objective())
        assert summary.prediction_error == pytest.approx(0.1)
        assert summary.request_prediction_error == pytest.approx(0.3)

    @pytest.mark.parametrize(("predicted", "found"), [(0, 48), (64, 112), (127, 64), (640, 703)])
    def test_what_is_less_than_a_block_was_not_predicted_wrongly(self, predicted: int, found: int):
        """Workers cache pages, routers know of blocks: else short prompts would look badly predicted."""
        summary = summarize(result([outcome(predicted_tokens=predicted, cached_tokens=found)]), Objective())
        assert (summary.prediction_error, summary.request_prediction_error) == (0, 0)

    def test_where_nothing_was_found_predictions_are_off_by_a_share_of_the_prompts(self):
        summary = summarize(result([outcome(prompt_tokens=2560, predicted_tokens=640, cached_tokens=0)]), Objective())
        assert (summary.prediction_error, summary.request_prediction_error) == (0.25, 0.25)

    def test_what_is_not_hit_is_lost_to_index_routing_and_workload(self):
        """The four counters of prompt tokens, and what the workload never had."""
        one = outcome(prompt_tokens=100, ceiling_tokens=90, reachable_tokens=70, predicted_tokens=50, cached_tokens=40)
        split = summarize(result([one, one, failed()]), Objective()).split
        shares = (split.hit, split.index, split.routing, split.gone, split.new)
        assert shares == pytest.approx((0.4, 0.1, 0.2, 0.2, 0.1))

    @pytest.mark.parametrize("found", [0, 45, 55, 75, 95, 100])
    def test_the_parts_make_one_whatever_was_found(self, found: int):
        """A worker may find more than was predicted, and tokens that no block of an earlier prompt had whole."""
        one = outcome(
            prompt_tokens=100, ceiling_tokens=90, reachable_tokens=70, predicted_tokens=50, cached_tokens=found
        )
        split = summarize(result([one]), Objective()).split
        shares = (split.hit, split.index, split.routing, split.gone, split.new)
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) >= 0.0
        assert split.hit == found / 100

    def test_rates_are_over_the_whole_run(self):
        outcomes = [outcome(0.0), outcome(2.5), outcome(2.5, first_token_s=3.9)]
        summary = summarize(result(outcomes), Objective(ttft_s=1.0, inter_token_s=0.2))
        assert summary.duration_s == 4.0
        assert (summary.requests_per_s, summary.prompt_tokens_per_s) == (3 / 4, 300 / 4)
        assert summary.output_tokens_per_s == 33 / 4
        assert (summary.goodput, summary.good_share) == (2 / 4, pytest.approx(2 / 3))
        assert summary.busy_share == 1.0

    def test_a_long_answer_at_the_end_does_not_decide_the_steady_rate(self):
        """Requests come until 10 s; one answer goes on to 100 s, in the other run to 200 s."""
        first, last = outcome(first_token_s=1.0, ended_s=9.0), outcome(10.0)
        runs = [[first, outcome(2.0, first_token_s=5.0, ended_s=end_s), last] for end_s in (100.0, 200.0)]
        short, long = (summarize(result(outcomes), Objective()) for outcomes in runs)
        assert short.output_tokens_per_s == pytest.approx(2 * long.output_tokens_per_s)
        assert short.steady_output_tokens_per_s == pytest.approx((11 + 1 + 10 * 5 / 95) / 10)
        assert long.steady_output_tokens_per_s == pytest.approx((11 + 1 + 10 * 5 / 195) / 10)

    def test_the_steady_rate_is_that_of_the_whole_run_where_all_arrive_at_the_start(self):
        summary = summarize(result([outcome(), outcome(ended_s=3.0)]), Objective())
        assert summary.steady_output_tokens_per_s == summary.output_tokens_per_s == 22 / 3

    def test_times_begin_with_the_arrival(self):
        summary = summarize(result([outcome(10.0), outcome(20.0)], gaps=[(0.1, 15), (0.4, 5)]), Objective())
        assert summary.ttft_s.mean == pytest.approx(0.5)
        assert summary.queue_s.mean == pytest.approx(0.1)
        assert summary.latency_s.mean == pytest.approx(1.5)
        assert (summary.inter_token_s.p50, summary.inter_token_s.p90) == (0.1, 0.4)

    def test_work_is_what_was_computed(self):
        outcomes = [
            outcome(worker=0, prompt_tokens=100, cached_tokens=90, output_tokens=10),
            outcome(worker=1, prompt_tokens=100, cached_tokens=50, output_tokens=10),
        ]
        summary = summarize(result(outcomes), Objective())
        assert summary.request_shares == (0.5, 0.5)
        assert summary.work_shares == (0.25, 0.75)
        assert summary.max_to_mean_work == 1.5

    def test_failures_are_counted_and_have_no_times(self):
        summary = summarize(result([outcome(), failed(), failed(ended_s=99.0)]), Objective())
        assert (summary.requests, summary.failed) == (3, 2)
        assert summary.ttft_s.p99 == pytest.approx(0.5)

    def test_work_is_not_made_up_where_no_worker_is_told(self):
        assert summarize(result([outcome(worker=-1)]), Objective()).max_to_mean_work is None

    def test_nothing_is_all_zero(self):
        summary = summarize(result([]), Objective())
        assert (summary.requests, summary.hit_rate, summary.requests_per_s, summary.max_to_mean_work) == (0, 0, 0, None)

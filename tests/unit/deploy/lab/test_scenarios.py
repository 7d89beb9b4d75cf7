"""What the default policy does in situations in which routers went wrong. Real policy, index, scheduler and cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.lab.simulation import Outage
from loadtest.workloads import Arrival, SharedPrefix, SiblingBursts
from tests.support.lab_fleet import H100, arrivals_of, figures, fleet, requests_by_worker, run, shared, slowed


class TestHotPrefix:
    """All prompts begin alike, and one worker cannot serve them all."""

    arrivals = staticmethod(lambda rate: shared(groups=1, per_group=100, prefix=2048, own=64, new=100, rate=rate))

    def test_stays_where_it_is_while_that_worker_has_little_to_do(self) -> None:
        """Another copy would cost a prefill and room in a second cache."""
        assert sorted(requests_by_worker(run(self.arrivals(4.0))))[:3] == [0, 0, 0]

    def test_spreads_over_all_before_its_worker_is_full(self) -> None:
        """Behaviour 47: as many prompts a second as need every worker's decoding."""
        result = run(self.arrivals(80.0), policy="min_cost")
        assert min(requests_by_worker(result)) >= 15, requests_by_worker(result)
        assert figures(result).hit_rate > figures(result).ceiling - 0.05

    @pytest.mark.parametrize(("workers", "rate"), [(4, 48.0), (16, 300.0)])
    def test_a_cold_fleet_has_it_everywhere_at_once(self, workers: int, rate: float) -> None:
        """Behaviour 47: as round robin does, which is the best here; 1.13 of its mean where eight wait for a copy."""
        arrivals = shared(groups=1, per_group=200, prefix=4096, own=128, new=96, rate=rate)
        ours, plain = (run(arrivals, fleet(workers), policy) for policy in ("min_cost", "round_robin"))
        assert min(requests_by_worker(ours)) > 0, requests_by_worker(ours)
        assert figures(ours).ttft_s.mean < 1.08 * figures(plain).ttft_s.mean

    def test_is_served_far_sooner_than_by_one_worker(self) -> None:
        """Behaviour 47: more than one worker can decode; a tenth of its time to first token at most."""
        arrivals = shared(groups=1, per_group=400, prefix=4096, own=128, new=256, rate=80.0)
        alone, spread = (figures(run(arrivals, fleet(workers))) for workers in (1, 4))
        assert spread.ttft_s.mean < 0.1 * alone.ttft_s.mean
        assert spread.hit_rate > spread.ceiling - 0.03


class TestSiblings:
    """Bursts of equal beginnings at one moment."""

    BURSTS = SiblingBursts(
        num_bursts=10, siblings=8, prefix_tokens=4096, unique_tokens=64, max_new_tokens=32, bursts_per_s=3.0
    )

    def test_a_burst_is_computed_once(self) -> None:
        """Behaviour 45: choices see each other's bookings, and the engine lets siblings wait for the first."""
        result = run(arrivals_of(self.BURSTS))
        assert figures(result).hit_rate > figures(result).ceiling - 0.02

    def test_a_burst_too_large_for_one_worker_is_shared(self) -> None:
        """Behaviour 45: 400 requests of one prefix, at once, on workers that run 195 each."""
        burst = shared(groups=1, per_group=400, prefix=1024, own=64, new=64, rate=None)
        shares = requests_by_worker(run(burst, fleet(4, kv_tokens=100_000)))
        assert min(shares) > 50, shares

    def test_equal_prompts_are_served_sooner_than_by_one_worker(self) -> None:
        """Behaviour 45: 64 at once, 16 places a worker; all have ended in 0.6 of one worker's time, or sooner."""
        first, *others = shared(groups=1, per_group=64, prefix=2048, own=10, new=100, rate=None)
        equal = [first, *(replace(other, runs=first.runs) for other in others)]
        alone, spread = (run(equal, fleet(workers, kv_tokens=64_000, places=16)) for workers in (1, 4))
        assert spread.duration_s < 0.6 * alone.duration_s
        shares = requests_by_worker(spread)
        assert 0 < min(shares) <= max(shares) <= 24, shares

    @pytest.mark.parametrize(("siblings", "workers"), [(8, 1), (16, 4)])
    def test_long_siblings_stay_together_while_that_is_cheapest(self, siblings: int, workers: int) -> None:
        """Behaviours 45 and 47: the first eight on one worker, then a copy for each of the others at once."""
        result = run(shared(groups=1, per_group=siblings, prefix=12_800, own=10, new=100, rate=None))
        assert sum(map(bool, requests_by_worker(result))) == workers

    def test_a_burst_is_torn_only_where_far_more_workers_are_idle_than_it_takes(self) -> None:
        """Behaviour 45: nobody else waits for them, and the last siblings have their first token sooner."""
        burst = shared(groups=1, per_group=6, prefix=6016, own=256, new=64, rate=None)
        few, many = run(burst, fleet(8)), run(burst, fleet(40))
        assert sum(map(bool, requests_by_worker(few))) == 1
        assert sum(map(bool, requests_by_worker(many))) > 1
        assert figures(many).ttft_s.mean < 0.97 * figures(few).ttft_s.mean

    def test_different_bursts_go_to_different_workers(self) -> None:
        result = run(arrivals_of(self.BURSTS))
        assert min(requests_by_worker(result)) > 0


class TestNewWorker:
    """Three warm workers, and a fourth that joins cold after some time."""

    def test_gets_the_overflow_of_one_hot_prefix(self) -> None:
        """Behaviour 48: nothing that it could do is not cached elsewhere."""
        arrivals = shared(groups=1, per_group=600, prefix=1024, own=64, new=100, rate=300.0)
        result = run(arrivals, outages=[Outage(3, 0.0, 1.0)])
        later = requests_by_worker(result, since_s=1.2)
        assert later[3] > 0.1 * sum(later), later

    def test_relieves_the_others_though_they_hold_every_prefix(self) -> None:
        """Behaviour 48: 12 prefixes, all warm on the three. What moves is computed once more, and pays."""
        arrivals = shared(groups=12, per_group=50, prefix=1024, own=64, new=100, rate=200.0)
        ours, theirs = (run(arrivals, policy=name, outages=[Outage(3, 0.0, 1.0)]) for name in ("min_cost", "sglang"))
        later = requests_by_worker(ours, since_s=1.2)
        assert later[3] > 0.15 * sum(later), later
        assert figures(ours).ttft_s.mean < 0.8 * figures(theirs).ttft_s.mean

    def test_gets_new_prefixes_first(self) -> None:
        """Behaviour 48: nothing has to leave a cache for them there."""
        arrivals = shared(groups=60, per_group=2, prefix=1024, own=64, new=32, rate=30.0)
        result = run(arrivals, fleet(4, kv_tokens=60_000), outages=[Outage(3, 0.0, 2.0)])
        soon = requests_by_worker(result, since_s=2.2, until_s=3.2)
        assert soon[3] == max(soon), soon


class TestReuse:
    """Against the SGLang rule and round robin, where there is something to find."""

    WORKLOADS = (
        shared(groups=24, per_group=12, prefix=2048, own=64, new=64, rate=40.0),
        arrivals_of(
            SiblingBursts(
                num_bursts=20, siblings=6, prefix_tokens=4096, unique_tokens=64, max_new_tokens=32, bursts_per_s=5.0
            )
        ),
    )

    @pytest.mark.parametrize("workload", WORKLOADS, ids=["prefixes", "bursts"])
    def test_is_no_later_than_the_sglang_rule_and_far_sooner_than_round_robin(self, workload: list[Arrival]) -> None:
        presets = fleet(4, kv_tokens=40_000)
        ours, theirs, plain = (figures(run(workload, presets, name)) for name in ("min_cost", "sglang", "round_robin"))
        assert ours.ttft_s.mean < 1.02 * theirs.ttft_s.mean
        assert ours.ttft_s.mean < 0.6 * plain.ttft_s.mean
        assert ours.output_tokens_per_s > 0.99 * max(theirs.output_tokens_per_s, plain.output_tokens_per_s)
        assert ours.hit_rate > ours.ceiling - 0.01

    def test_prefixes_that_do_not_fit_the_fleet_are_not_spread(self) -> None:
        """Behaviour 46: the caches hold 0.8 of them; spreading would hold each many times and so fewer."""
        arrivals = shared(groups=64, per_group=6, prefix=2048, own=128, new=64, rate=15.0)
        ours, plain = (figures(run(arrivals, fleet(4, kv_tokens=26_240), name)) for name in ("min_cost", "round_robin"))
        assert ours.hit_rate > 2 * plain.hit_rate

    def test_locality_is_not_thrown_away_far_over_capacity(self) -> None:
        """Behaviour 46: 1,024 requests of 64 prefixes at once on 8 workers of 16 places; 0.88 is the most there is."""
        arrivals = shared(groups=64, per_group=16, prefix=2048, own=128, new=128, rate=None)
        presets = fleet(8, kv_tokens=64_000, places=16)
        ours, plain = (figures(run(arrivals, presets, name)) for name in ("min_cost", "round_robin"))
        assert ours.hit_rate > 0.85
        assert plain.hit_rate < 0.6

    def test_a_prefix_stays_where_it_is_while_that_pool_is_full(self) -> None:
        """Behaviour 46: six requests fill a pool. Whoever goes elsewhere for room computes a prefix that is there."""
        arrivals = shared(groups=48, per_group=5, prefix=8192, own=128, new=64, rate=60.0)
        ours = figures(run(arrivals, fleet(8, kv_tokens=50_000)))
        assert ours.hit_rate > ours.ceiling - 0.03

    def test_many_groups_at_once_are_dealt_evenly(self) -> None:
        """The published experiment, smaller: nobody gets a group more than another, and no group is torn."""
        arrivals = shared(groups=16, per_group=16, prefix=2048, own=128, new=32, rate=None)
        result = run(arrivals)
        assert requests_by_worker(result) == [64] * 4
        assert figures(result).hit_rate == pytest.approx(figures(result).ceiling, abs=0.002)


class TestMixedSpeeds:
    """Two workers as they are, two whose steps take three times as long."""

    PRESETS = (H100, H100, slowed(H100, 3.0), slowed(H100, 3.0))

    @pytest.mark.parametrize("prefix", [0, 1024])
    def test_the_slow_ones_get_less(self, prefix: int) -> None:
        arrivals = shared(groups=24, per_group=10, prefix=prefix, own=1024, new=64, rate=70.0)
        default = run(arrivals, self.PRESETS)
        even = run(arrivals, self.PRESETS, policy="round_robin")
        fast, slow = sum(requests_by_worker(default)[:2]), sum(requests_by_worker(default)[2:])
        assert 0 < slow < 0.7 * fast
        assert figures(default).ttft_s.p90 < 0.7 * figures(even).ttft_s.p90


class TestRestart:
    """Worker 0 dies at 2 s and is back, empty, at 4 s."""

    ARRIVALS = staticmethod(lambda: shared(groups=16, per_group=30, prefix=2048, own=64, new=64, rate=60.0))
    OUTAGE = Outage(0, 2.0, 4.0)

    def test_every_request_has_one_outcome_and_only_those_with_tokens_are_lost(self) -> None:
        """Behaviour 53: tried once more elsewhere before the first token, and never after it."""
        result = run(self.ARRIVALS(), outages=[self.OUTAGE])
        lost = [outcome for outcome in result.outcomes if outcome.error]
        assert lost
        assert all(outcome.first_token_s is not None and outcome.first_token_s < 2.0 for outcome in lost)
        assert all(outcome.worker == 0 for outcome in lost)
        assert all(outcome.is_complete for outcome in result.outcomes if outcome not in lost)

    def test_a_request_without_a_token_is_answered_by_another_worker(self) -> None:
        """Behaviour 53."""
        arrivals = shared(groups=30, per_group=1, prefix=8192, own=64, new=8, rate=None)
        result = run(arrivals, outages=[Outage(0, 0.3, 60.0)])
        again = [outcome for outcome in result.outcomes if outcome.tries == 2]
        assert again
        assert all(outcome.worker != 0 and outcome.is_complete for outcome in again)

    def test_it_gets_nothing_while_it_is_away(self) -> None:
        result = run(self.ARRIVALS(), outages=[self.OUTAGE])
        assert requests_by_worker(result, since_s=2.0, until_s=4.0)[0] == 0

    def test_with_nobody_left_requests_fail_with_the_reason(self) -> None:
        arrivals = shared(groups=4, per_group=10, rate=10.0)
        result = run(arrivals, fleet(1), outages=[Outage(0, 1.0, 2.0)])
        away = [outcome for outcome in result.outcomes if 1.0 <= outcome.arrived_s < 2.0]
        assert away
        assert all("disconnected" in outcome.error for outcome in away)
        assert all(outcome.is_complete for outcome in result.outcomes if outcome.arrived_s >= 2.0)


class TestTwoRouters:
    """Each sees all reports, and its own requests."""

    def test_hit_nearly_as_often_as_one(self) -> None:
        """Behaviour 51."""
        workload = SharedPrefix(
            num_groups=48,
            prompts_per_group=12,
            prefix_tokens=2048,
            unique_tokens=64,
            max_new_tokens=64,
            requests_per_s=30.0,
        )
        one, two = (figures(run(arrivals_of(workload), num_routers=routers)) for routers in (1, 2))
        assert two.hit_rate > one.hit_rate - 0.02
        assert two.ttft_s.mean < 1.3 * one.ttft_s.mean


class TestAccuracy:
    """Prefixes that take 1.5 times the fleet's KV: evictions all the time."""

    @pytest.mark.parametrize(("truth", "most"), [("deltas", 0.02), ("receipts", 0.10)])
    def test_predicted_and_found_tokens_agree(self, truth: str, most: float) -> None:
        """The fleet is overloaded here: much is evicted while a request waits in its worker's queue."""
        arrivals = shared(groups=72, per_group=6, prefix=2048, own=64, new=32, rate=40.0)
        result = run(arrivals, fleet(4, kv_tokens=24_576), truth=truth)
        assert figures(result).request_prediction_error < most
        assert 0.2 < figures(result).hit_rate < figures(result).ceiling - 0.1

    @pytest.mark.parametrize(("truth", "most"), [("deltas", 0.02), ("receipts", 0.10)])
    def test_predictions_are_right_where_nothing_waits_long(self, truth: str, most: float) -> None:
        """The same fleet at a quarter of the load, request by request."""
        arrivals = shared(groups=72, per_group=6, prefix=2048, own=64, new=32, rate=10.0)
        result = run(arrivals, fleet(4, kv_tokens=24_576), truth=truth)
        assert figures(result).request_prediction_error < most
        assert 0.2 < figures(result).hit_rate < figures(result).ceiling - 0.1

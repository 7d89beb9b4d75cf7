"""The lab: deterministic, exact with and without leaps, and with every request accounted for."""

from __future__ import annotations

from dataclasses import astuple
from random import Random

import pytest

from deploy.lab.simulation import Outage, Prepared, Setup, Simulation, prepare
from loadtest.results import RunResult
from loadtest.workloads import Arrival, Chats, SharedPrefix, SiblingBursts, Workload
from router.policies import POLICY_NAMES, make_policy
from router.view import Ranking, RequestView, WorkerView
from tests.support.lab_fleet import arrivals_of, figures, fleet, run, shared

CHATS = Chats(
    num_chats=30,
    turns=3,
    num_systems=3,
    system_tokens=256,
    user_tokens=100,
    answer_tokens=60,
    think_s=2.0,
    chats_per_s=10.0,
)
BURSTS = SiblingBursts(
    num_bursts=12, siblings=6, prefix_tokens=1000, unique_tokens=100, max_new_tokens=40, bursts_per_s=8.0
)
TIGHT = SharedPrefix(
    num_groups=12,
    prompts_per_group=5,
    prefix_tokens=1500,
    unique_tokens=80,
    max_new_tokens=120,
    zipf=0.8,
    requests_per_s=60.0,
)


def trail(result: RunResult) -> object:
    """All that a run gave, to the last bit."""
    return (
        [astuple(outcome) for outcome in result.outcomes],
        result.duration_s,
        result.gaps_s.tobytes(),
        result.gap_tokens.tobytes(),
        list(result.busy_s),
    )


def gaps_of(result: RunResult) -> dict[float, int]:
    """How many tokens came after each gap, to a picosecond: leaps and steps put equal gaps together in other ways."""
    counts: dict[float, int] = {}
    for seconds, tokens in zip(result.gaps_s.tolist(), result.gap_tokens.tolist(), strict=True):
        counts[round(seconds, 12)] = counts.get(round(seconds, 12), 0) + tokens
    return counts


class TestLeaps:
    @pytest.mark.parametrize(
        ("workload", "kv_tokens"), [(CHATS, 8_000), (BURSTS, 5_000), (TIGHT, 5_600)], ids=["chats", "bursts", "tight"]
    )
    @pytest.mark.parametrize("truth", ["deltas", "receipts"])
    def test_make_no_difference(self, workload: Workload, kv_tokens: int, truth: str) -> None:
        """With pools so small that prefixes are evicted, and requests wait for room."""
        arrivals = arrivals_of(workload)
        leaping, stepping = (
            run(arrivals, fleet(3, kv_tokens=kv_tokens), truth=truth, leaps=leaps) for leaps in (True, False)
        )
        assert [astuple(o) for o in leaping.outcomes] == [astuple(o) for o in stepping.outcomes]
        assert gaps_of(leaping) == gaps_of(stepping)
        assert leaping.busy_s == pytest.approx(stepping.busy_s)
        assert figures(leaping).hit_rate > 0.3
        assert any(outcome.cached_tokens < outcome.ceiling_tokens - 64 for outcome in leaping.outcomes)
        assert figures(leaping).queue_s.p99 > 0.01

    def test_make_no_difference_when_workers_come_and_go(self) -> None:
        outages = [Outage(0, 1.0, 2.5), Outage(2, 0.0, 3.0)]
        leaping, stepping = (
            run(shared(rate=30.0), fleet(3), outages=outages, num_routers=2, leaps=leaps) for leaps in (True, False)
        )
        assert [astuple(o) for o in leaping.outcomes] == [astuple(o) for o in stepping.outcomes]


class TestDeterminism:
    def test_the_same_seed_gives_the_same_result(self) -> None:
        arrivals = arrivals_of(CHATS)
        first, second = (run(arrivals, policy="power_of_two", seed=3) for _ in range(2))
        assert trail(first) == trail(second)

    def test_another_seed_draws_other_choices(self) -> None:
        arrivals = arrivals_of(CHATS)
        first, second = (run(arrivals, policy="random", seed=seed) for seed in (3, 4))
        assert trail(first) != trail(second)


class TestOutcomes:
    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_every_request_is_answered_and_timed_in_order(self, policy: str) -> None:
        arrivals = arrivals_of(CHATS)
        result = run(arrivals, policy=policy)
        assert len(result.outcomes) == len(arrivals)
        for arrival, outcome in zip(arrivals, result.outcomes, strict=True):
            assert outcome.is_complete
            assert (outcome.prompt_tokens, outcome.output_tokens) == (arrival.prompt_tokens, arrival.max_new_tokens)
            assert outcome.arrived_s == arrival.at_s
            moments = (outcome.arrived_s, outcome.started_s, outcome.first_token_s, outcome.ended_s)
            assert list(moments) == sorted(moments)
            assert outcome.cached_tokens <= outcome.ceiling_tokens
            assert outcome.predicted_tokens <= outcome.reachable_tokens < outcome.prompt_tokens
        tokens = sum(arrival.max_new_tokens for arrival in arrivals)
        assert result.gap_tokens.sum() == tokens - len(arrivals)
        assert result.duration_s == max(outcome.ended_s or 0.0 for outcome in result.outcomes)

    def test_gaps_add_up_to_the_time_from_first_to_last_token(self) -> None:
        result = run(arrivals_of(TIGHT), fleet(2, kv_tokens=9_600))
        between = sum((o.ended_s or 0.0) - (o.first_token_s or 0.0) for o in result.outcomes)
        assert float((result.gaps_s * result.gap_tokens).sum()) == pytest.approx(between)

    def test_the_next_turn_of_a_chat_finds_the_last_ones_answer(self) -> None:
        """Behaviour 26."""
        one = Chats(
            num_chats=1,
            turns=5,
            num_systems=1,
            system_tokens=128,
            user_tokens=64,
            answer_tokens=64,
            think_s=60.0,
            chats_per_s=1.0,
        )
        result = run(arrivals_of(one), fleet(1))
        # Whole pages of 16 tokens.
        assert all(o.cached_tokens >= o.ceiling_tokens - 16 for o in result.outcomes)
        assert result.outcomes[-1].ceiling_tokens > 128 + 64

    def test_a_request_that_can_never_fit_fails_with_the_reason_and_the_others_go_on(self) -> None:
        arrivals = shared(groups=1, per_group=5) + shared(groups=1, per_group=1, prefix=9_000, rate=None)
        arrivals.sort(key=lambda arrival: arrival.at_s)
        result = run(arrivals, fleet(2, kv_tokens=8_000))
        refused = [outcome for outcome in result.outcomes if outcome.error]
        assert [outcome.prompt_tokens for outcome in refused] == [9_064]
        assert "8000 tokens" in refused[0].error
        assert figures(result).failed == 1

    def test_progress_is_told_up_to_the_end(self) -> None:
        arrivals = shared(groups=2)
        told: list[int] = []
        prepared: list[int] = []
        workload = prepare(arrivals, prepared.append)
        Simulation(make_policy("min_cost"), Setup(fleet()), workload).run(told.append)
        assert prepared == list(range(1, 21))
        assert told == sorted(told)
        assert told[-1] == 20


class _Views:
    """Notes what a policy is shown, and sends every request to worker 0."""

    name = "first"

    def __init__(self) -> None:
        self.seen: list[list[WorkerView]] = []

    def rank(self, request: RequestView, workers: list[WorkerView], random: Random) -> Ranking:
        self.seen.append(list(workers))
        return Ranking(0, "only", {worker.slot: float(worker.slot) for worker in workers})


class TestReports:
    """What a router knows, and when: own bookings at once, reports late."""

    def watch(self, arrivals: list[Arrival], **setup: object) -> list[list[WorkerView]]:
        policy = _Views()
        Simulation(policy, Setup(fleet(2), **setup), prepare(arrivals)).run()  # type: ignore[arg-type]
        return policy.seen

    def test_a_booking_counts_at_once(self) -> None:
        seen = self.watch(shared(groups=1, per_group=4, rate=None))
        assert [views[0].requests_in_flight for views in seen] == [0, 1, 2, 3]
        assert seen[1][0].outstanding_prompt_tokens == 1_088

    def test_a_report_comes_when_it_is_taken_and_a_delay_later(self) -> None:
        arrivals = shared(groups=60, per_group=1, new=400, rate=60.0)
        known_s = {}
        for delay_s in (0.0, 0.4):
            seen = self.watch(arrivals, report_delay_s=delay_s)
            # Its own bookings tell the router of tokens to compute; of those computed only a report does.
            computed = [views[0].kv_protected_tokens > views[0].outstanding_prompt_tokens for views in seen]
            known_s[delay_s] = arrivals[computed.index(True)].at_s
        assert 0.1 <= known_s[0.0] <= 0.3
        assert 0.5 <= known_s[0.4] <= 0.7

    def test_only_the_worker_knows_of_its_evictions_and_tells(self) -> None:
        arrivals = shared(groups=12, per_group=4, prefix=2048, rate=2.0)
        results = {truth: run(arrivals, fleet(1, kv_tokens=8_000), truth=truth) for truth in ("deltas", "receipts")}
        assert figures(results["deltas"]).prediction_error < 0.02
        assert figures(results["deltas"]).hit_rate == figures(results["receipts"]).hit_rate


class TestSeveralRouters:
    def test_one_knows_what_another_has_sent_before_it_is_computed(self) -> None:
        """Behaviour 51: a worker with work for seconds; what the second router cannot know it is told."""
        waiting = shared(groups=40, per_group=1, prefix=8_000, new=1, rate=None)
        late = [Arrival(1.0, each.runs, each.max_new_tokens, each.answer, each.source) for each in waiting]
        policy = _Matches()
        setup = Setup(fleet(1, kv_tokens=1_000_000), num_routers=2)
        result = Simulation(policy, setup, prepare(waiting + late)).run()
        started_s = [outcome.started_s for outcome in result.outcomes[:40]]
        assert sum(at_s > 1.0 for at_s in started_s) > 20, "most are not even begun when the others come"
        assert policy.matched[40:] == [126] * 40

    def test_routers_without_word_from_the_workers_are_told_nothing(self) -> None:
        policy = _Matches()
        waiting = shared(groups=4, per_group=1, prefix=8_000, new=1, rate=None)
        setup = Setup(fleet(1, kv_tokens=1_000_000), num_routers=2, truth="receipts")
        Simulation(policy, setup, prepare(waiting)).run()
        assert policy.matched == [0] * 4


class _Matches:
    """Notes what is thought to be on worker 0, and sends every request there."""

    name = "first"

    def __init__(self) -> None:
        self.matched: list[int] = []

    def rank(self, request: RequestView, workers: list[WorkerView], random: Random) -> Ranking:
        self.matched.append(int(request.matched_blocks[0]))
        return Ranking(0, "only", {worker.slot: 0.0 for worker in workers})


def test_many_events_at_one_moment() -> None:
    """Arrivals on the grid of the reports."""
    arrivals = [
        Arrival(index // 3 * 0.1, each.runs, each.max_new_tokens, each.answer, each.source)
        for index, each in enumerate(shared(groups=6, per_group=10))
    ]
    assert figures(run(arrivals)).failed == 0


class TestPrepared:
    def test_hashes_are_those_of_the_prompts(self) -> None:
        arrivals = shared(groups=2, per_group=2)
        workload: Prepared = prepare(arrivals)
        by_group: dict[int, set[bytes]] = {}
        for arrival, hashes in zip(arrivals, workload.block_hashes, strict=True):
            assert len(hashes) == arrival.prompt_tokens // 64
            by_group.setdefault(arrival.runs[0].name, set()).add(hashes[:16].tobytes())
        assert [len(beginnings) for beginnings in by_group.values()] == [1, 1]
        assert sorted(workload.reusable) == [0, 0, 1024, 1024]

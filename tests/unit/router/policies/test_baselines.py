"""The rules of the baselines, number by number."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from router.policies import make_policy
from router.view import Ranking, RequestView, WorkerView
from tests.support.views import request, worker


def rank(name: str, view: RequestView, workers: list[WorkerView], seed: int = 0) -> Ranking:
    return make_policy(name).rank(view, workers, Random(seed))


class TestSGLang:
    def test_a_match_over_the_threshold_wins(self) -> None:
        workers = [worker(0, running=60), worker(1)]
        ranking = rank("sglang", request(640, [4, 0]), workers)
        assert (ranking.slot, ranking.reason) == (0, "prefix")

    def test_below_the_threshold_the_smallest_tree_wins(self) -> None:
        workers = [worker(0, sketch_blocks=5), worker(1, running=9, sketch_blocks=4)]
        assert rank("sglang", request(640, [3, 0]), workers).slot == 1, "0.3 is not more than 0.3"

    @pytest.mark.parametrize(
        ("most", "fewest", "slot"),
        [(64, 0, 0), (65, 0, 1), (195, 130, 0), (196, 130, 1), (300, 200, 0), (301, 200, 1)],
    )
    def test_out_of_balance_the_shortest_queue_wins(self, most: int, fewest: int, slot: int) -> None:
        """Both bounds must be passed: 64 requests and a ratio of 1.5."""
        workers = [worker(0, running=most), worker(1, running=fewest)]
        assert rank("sglang", request(640, [10, 0]), workers).slot == slot


class TestLinear:
    def test_cost_is_prefill_blocks_and_held_blocks(self) -> None:
        workers = [worker(0, queued_tokens=640, kv_protected=1_280), worker(1, kv_protected=6_400)]
        ranking = rank("linear", request(1_280, [10, 0]), workers)
        assert ranking.costs == {0: 10 + 10 + 20 + 10, 1: 20 + 100 + 20}
        assert (ranking.slot, ranking.reason) == (0, "prefix")

    def test_load_outweighs_overlap(self) -> None:
        workers = [worker(0, kv_protected=6_400), worker(1)]
        ranking = rank("linear", request(1_280, [20, 0]), workers)
        assert (ranking.slot, ranking.reason) == (1, "spill")


class TestPrefixHash:
    def test_equal_beginnings_have_one_home(self) -> None:
        workers = [worker(slot) for slot in range(8)]
        homes = {
            rank("prefix_hash", request(length), workers, seed).slot for seed, length in enumerate((256, 300, 9_000))
        }
        assert len(homes) == 1

    def test_homes_are_spread(self) -> None:
        workers = [worker(slot) for slot in range(8)]
        homes = Counter(rank("prefix_hash", request(prefix=p), workers).slot for p in range(800))
        assert min(homes.values()) > 50

    def test_a_worker_that_leaves_moves_only_its_own(self) -> None:
        workers = [worker(slot) for slot in range(8)]
        for prefix in range(200):
            home = rank("prefix_hash", request(prefix=prefix), workers).slot
            rest = [w for w in workers if w.slot != (3 if home != 3 else 4)]
            assert rank("prefix_hash", request(prefix=prefix), rest).slot == home

    def test_load_is_bounded(self) -> None:
        home = rank("prefix_hash", request(), [worker(slot) for slot in range(4)]).slot
        for running, reason in ((12, "hash"), (14, "spill")):
            workers = [worker(slot, running=running if slot == home else 10) for slot in range(4)]
            ranking = rank("prefix_hash", request(), workers)
            assert ranking.reason == reason
            assert (ranking.slot == home) == (reason == "hash")


class TestCounting:
    def test_least_load_counts_waiting_too(self) -> None:
        workers = [worker(0, running=3, waiting=3), worker(1, running=5), worker(2, running=6)]
        assert rank("least_load", request(), workers).slot == 1

    def test_round_robin_takes_turns(self) -> None:
        last = dict.fromkeys(range(5), 0)
        turns = []
        for booking in range(1, 26):
            workers = [worker(slot, last_booking=number) for slot, number in last.items()]
            slot = rank("round_robin", request(), workers, seed=booking).slot
            assert slot is not None
            last[slot] = booking
            turns.append(slot)
        assert all(sorted(turns[i : i + 5]) == list(range(5)) for i in range(0, 25, 5))
        assert turns[:5] == turns[5:10] == turns[20:25]

    def test_power_of_two_never_takes_the_busiest_and_mixes_the_rest(self) -> None:
        workers = [worker(slot, running=slot) for slot in range(4)]
        drawn = Counter(rank("power_of_two", request(), workers, seed).slot for seed in range(600))
        assert set(drawn) == {0, 1, 2}
        assert drawn[0] == pytest.approx(300, abs=60)
        assert drawn[1] == pytest.approx(200, abs=60)

    def test_random_is_even(self) -> None:
        workers = [worker(slot, running=100 * slot) for slot in range(4)]
        drawn = Counter(rank("random", request(), workers, seed).slot for seed in range(800))
        assert min(drawn.values()) > 150

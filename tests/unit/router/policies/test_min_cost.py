"""The default policy: its cost. What follows from it in a fleet: tests/unit/deploy/lab/test_scenarios.py."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from router.policies import make_policy
from router.view import Ranking, RequestView, WorkerView
from tests.bench.candidate_policies import shape
from tests.support.views import request, worker


def rank(view: RequestView, workers: list[WorkerView]) -> Ranking:
    return make_policy("min_cost").rank(view, workers, Random(0))


def cost_of(view: RequestView, *workers: WorkerView) -> list[float]:
    return [rank(view, list(workers)).costs[each.slot] for each in workers]


class TestCost:
    """640 prompt tokens; each part of the formula by itself."""

    def test_what_must_be_computed(self) -> None:
        assert cost_of(request(640, [5, 10, 0]), worker(0), worker(1), worker(2)) == [320, 0, 640]

    @pytest.mark.parametrize("seed", range(20))
    def test_the_plain_form_that_candidates_are_compared_with_is_the_same(self, seed: int) -> None:
        """The policy itself is written for speed."""
        draw = Random(seed)
        count = draw.choice([5, 40])
        workers = [
            worker(
                slot,
                running=draw.randrange(40),
                waiting=draw.choice([0, 0, 0, 4]),
                queued_tokens=draw.choice([0, draw.randrange(9_000)]),
                max_running=32,
                kv_tokens=100_000,
                sketch_blocks=draw.randrange(1_500),
            )
            for slot in range(count)
        ]
        held = draw.choice([[0, 4, 10], [0, 4, 10], [10], [0]])
        matched = [draw.choice(held) for _ in workers]
        users = {slot: draw.randrange(20) for slot in range(count) if matched[slot]}
        used_for_s = {slot: draw.choice([0.0, 0.004, 0.006, 1.0]) for slot, count in users.items() if count}
        view = request(640, matched)._replace(users=users, used_for_s=used_for_s)
        assert shape().rank(view, workers, Random(0)).costs == pytest.approx(rank(view, workers).costs)

    def test_what_waits_counts_for_half_where_nobody_else_has_a_queue(self) -> None:
        assert cost_of(request(640, [0, 0]), worker(0, queued_tokens=1_000), worker(1)) == [640 + 500, 640]

    @pytest.mark.parametrize(("idle", "weight"), [(1, 1 / 2), (8, 1 / 2), (16, 2 / 3), (56, 7 / 8)])
    def test_what_waits_counts_nearly_whole_where_more_are_idle_than_a_burst_takes(
        self, idle: int, weight: float
    ) -> None:
        busy = worker(0, queued_tokens=1_000)
        costs = cost_of(request(640, [0] * (idle + 1)), busy, *(worker(slot + 1) for slot in range(idle)))
        assert costs == pytest.approx([640 + weight * 1_000] + [640] * idle)

    @pytest.mark.parametrize(
        "busy",
        [
            {"running": 8},
            {"running": 150},
            {"running": 4, "max_running": 4},
            {"running": 1, "waiting": 1},
            {"queued_tokens": 1},
        ],
        ids=["as many decode as a burst has siblings", "more decodes", "no place", "one waits for memory", "queue"],
    )
    def test_workers_that_a_prefill_would_delay_are_not_idle(self, busy: dict[str, Any]) -> None:
        """Then Q counts for half, as where few are idle."""
        others = [worker(slot, kv_tokens=10_000, **busy) for slot in range(1, 57)]
        assert self.weight_of_queue(others) == pytest.approx(1 / 2, abs=0.002)
        few_decode = [worker(slot, running=7, max_running=64, kv_tokens=10_000) for slot in range(1, 57)]
        assert self.weight_of_queue(few_decode) == pytest.approx(7 / 8)

    @staticmethod
    def weight_of_queue(others: list[WorkerView]) -> float:
        """Of a worker beside these: what each of its queue's tokens adds to its cost."""
        view = request(640, [0] * 57)
        queues = worker(0, queued_tokens=1_000), worker(0)
        long, none = (cost_of(view, behind, *others)[0] for behind in queues)
        return (long - none) / 1_000

    @pytest.mark.parametrize("workers", [40, 64])
    @pytest.mark.parametrize(("decoding", "together"), [(0, range(3, 6)), (150, range(18, 24))])
    def test_a_burst_is_torn_later_where_all_are_busy_decoding(
        self, workers: int, decoding: int, together: range
    ) -> None:
        """Behaviour 45: siblings of 6,016 + 256 tokens. Each tear has 6,272 tokens computed beside 150 decodes."""

        def slot(siblings: int) -> int | None:
            view = RequestView(6_272, request(6_272).block_hashes, [94] + [0] * (workers - 1), {0: siblings})
            holder = worker(0, running=decoding + siblings, queued_tokens=6_016 + 256 * siblings)
            return rank(view, [holder, *(worker(other, running=decoding) for other in range(1, workers))]).slot

        assert next(siblings for siblings in range(1, 64) if slot(siblings) != 0) in together

    def test_what_waits_counts_less_the_more_waits_everywhere(self) -> None:
        view = request(640, [0] * 4)
        queues = 5_120, 1_280, 640, 0
        costs = cost_of(view, *(worker(slot, queued_tokens=tokens) for slot, tokens in enumerate(queues)))
        weight = 640 / (2 * 640 + 3 * 640)
        assert costs == pytest.approx([640 + weight * tokens for tokens in queues])

    def test_a_few_long_queues_do_not_say_that_there_is_waiting_everywhere(self) -> None:
        """The prompt is cached behind one of two long ones, and the other workers idle: it is better computed again."""
        view = request(20_000, [300, 0, 0, 0])
        behind = worker(0, running=1, queued_tokens=60_000)
        others = worker(1, running=1, queued_tokens=100_000), worker(2), worker(3)
        assert rank(view, [behind, *others]).slot in {2, 3}
        everywhere = [worker(slot, running=1, queued_tokens=60_000) for slot in range(1, 4)]
        assert rank(view, [behind, *everywhere]).slot == 0

    def test_kv_tokens_that_must_come_free_count_as_what_waits(self) -> None:
        """240 for the first, none for the second, which holds half of the prompt, and none for the third."""
        full = {"kv_tokens": 10_000, "kv_protected": 9_600}
        costs = cost_of(request(640, [0, 5, 0]), worker(0, **full), worker(1, **full), worker(2, kv_tokens=10_000))
        assert costs == pytest.approx([640 + 240 / 2, 320, 640])

    def test_cached_blocks_that_can_be_evicted_are_room(self) -> None:
        """Behaviour 46."""
        full_cache = {"kv_tokens": 10_000, "sketch_blocks": 10_000 // 64}
        assert cost_of(request(640, [0, 0]), worker(0, **full_cache), worker(1, **full_cache)) == [640 * 1.1] * 2

    def test_the_last_worker_with_room_does_not_get_all_that_comes(self) -> None:
        full = [worker(slot, running=5, kv_tokens=10_000, kv_protected=9_800) for slot in range(1, 4)]
        view = request(640, [0] * 4)
        assert rank(view, [worker(0, kv_tokens=10_000), *full]).slot == 0
        assert rank(view, [worker(0, queued_tokens=640, kv_tokens=10_000), *full]).slot != 0

    def test_requests_above_the_least_loaded_count_by_the_cube(self) -> None:
        costs = cost_of(request(640, [10, 10]), worker(0, running=40), worker(1, running=8))
        assert costs == pytest.approx([2.5 * 640 * (32 / (32 + 24)) ** 3, 0])

    def test_requests_that_must_end_first_count_twice(self) -> None:
        full = worker(0, running=3, waiting=1, max_running=4)
        assert cost_of(request(640, [10, 10]), full, worker(1)) == pytest.approx([2.5 * 640 * (5 / (32 + 2)) ** 3, 0])

    def test_users_share_the_price_of_a_copy(self) -> None:
        """Eight use it, and all that is in flight does: half of what the others lack is theirs to pay."""
        view = RequestView(640, request(640).block_hashes, [10, 10, 5, 0], {0: 8, 2: 1})
        assert cost_of(view, *(worker(slot) for slot in range(4))) == pytest.approx([0, 0, 320 - 160, 640 - 320])

    def test_users_that_hardly_load_those_who_hold_the_prefix_pay_little(self) -> None:
        """The same eight among 32 requests on each worker: a quarter of that."""
        view = RequestView(640, request(640).block_hashes, [10, 0], {0: 8})
        assert cost_of(view, worker(0, running=32), worker(1, running=32)) == pytest.approx([0, 640 - 80])

    def test_users_pay_in_full_until_those_who_hold_the_prefix_are_no_busier_than_others(self) -> None:
        """Eight each on two workers of three, then on three of three."""
        view = RequestView(640, request(640).block_hashes, [10, 10, 0], {0: 8, 1: 8})
        workers = worker(0, running=8), worker(1, running=8), worker(2, running=8)
        assert cost_of(view, *workers)[2] == pytest.approx(640 - 640 * 16**4 / (16**4 + 8**4))
        busier = worker(0, running=8), worker(1, running=8), worker(2, running=32)
        spared = 640 * 16**4 / (16**4 + 8**4) / 2
        assert cost_of(view, *busier)[2] == pytest.approx(640 - spared + 2.5 * 640 * (24 / 48) ** 3)

    @pytest.mark.parametrize(("used_for_s", "spared"), [(0.0, 0.0), (0.004, 0.0), (0.006, 1.25**4 / (1.25**4 + 1))])
    def test_a_prefix_that_is_nearly_all_the_fleet_does_and_goes_on_is_copied_at_once(
        self, used_for_s: float, spared: float
    ) -> None:
        """One request alone is in flight, and the next with its prefix comes in the same moment, or later."""
        view = RequestView(640, request(640).block_hashes, [10, 0], {0: 1}, {0: used_for_s})
        assert cost_of(view, worker(0, running=1), worker(1))[1] == pytest.approx(640 * (1 - spared), abs=0.2)

    def test_computing_costs_more_where_more_is_cached_by_others(self) -> None:
        pool = {"kv_tokens": 64_000}
        costs = cost_of(
            request(640, [0, 10]), worker(0, sketch_blocks=300, **pool), worker(1, sketch_blocks=100, **pool)
        )
        assert costs == pytest.approx([640 * 1.15, 0])
        new = cost_of(request(640, [0, 0]), worker(0, sketch_blocks=300, **pool), worker(1, sketch_blocks=100, **pool))
        assert new[1] == pytest.approx(640 * 1.05)

    def test_users_on_workers_that_are_not_eligible_do_not_matter(self) -> None:
        view = RequestView(640, request(640).block_hashes, [10, 10], {0: 12, 1: 12})
        assert set(rank(view, [worker(0, breaker_open=True), worker(1)]).costs) == {1}


@pytest.mark.parametrize(
    ("matched", "queued", "slot", "reason"),
    [([0, 0], 1_000, 1, "load"), ([10, 0], 1_000, 0, "prefix"), ([10, 0], 4_000, 1, "spill")],
)
def test_the_reasons(matched: list[int], queued: int, slot: int, reason: str) -> None:
    ranking = rank(request(640, matched), [worker(0, queued_tokens=queued), worker(1)])
    assert (ranking.slot, ranking.reason) == (slot, reason)


def test_equals_are_drawn_at_random() -> None:
    workers = [worker(slot) for slot in range(4)]
    policy = make_policy("min_cost")
    assert {policy.rank(request(), workers, Random(seed)).slot for seed in range(60)} == {0, 1, 2, 3}


def test_a_miss_does_not_go_to_the_busy_worker_with_the_small_tree() -> None:
    """Behaviour 46."""
    busy = worker(0, running=40, queued_tokens=50_000, sketch_blocks=0)
    idle = worker(1, sketch_blocks=5_000, kv_tokens=320_000)
    assert rank(request(2_000, [0, 0]), [busy, idle]).slot == 1
    assert make_policy("sglang").rank(request(2_000, [0, 0]), [busy, idle], Random(0)).slot == 0


def test_an_idle_worker_relieves_those_that_only_decode() -> None:
    """Behaviour 48: every prompt is wholly cached on worker 0, nothing is outstanding, and yet it is not free."""
    warm, idle = worker(0, running=40), worker(1)
    assert rank(request(2_000, [31, 0]), [warm, idle]).slot == 1
    assert rank(request(2_000, [31, 0]), [worker(0, running=20), idle]).slot == 0

"""Who may get a request, and what the snapshots work out."""

from __future__ import annotations

import pytest

from radixfleet.types import WorkerStatus
from router.view import NOBODY, Ranking, eligible, ineligible_reason
from tests.support.views import request, worker


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (worker(0), ""),
        (worker(0, connected=False), "disconnected"),
        (worker(0, status=WorkerStatus.LOADING), "loading"),
        (worker(0, status=WorkerStatus.DRAINING), "draining"),
        (worker(0, status=WorkerStatus.FAILED), "failed"),
        (worker(0, breaker_open=True), "breaker"),
        (worker(0, status=WorkerStatus.DRAINING, connected=False), "disconnected"),
        (worker(0, kv_tokens=2_000, kv_protected=1_001), "kv-full"),
        (worker(0, kv_tokens=2_000, kv_protected=1_000), ""),
        (worker(0, kv_tokens=100, breaker_open=True), "breaker"),
    ],
)
def test_each_reason_has_a_name(view, reason: str) -> None:
    assert ineligible_reason(view, request(1_000)) == reason
    assert bool(eligible(request(1_000), [view, worker(1)])[0] is view) == (reason == "")


def test_only_what_cannot_be_evicted_counts_against_headroom() -> None:
    """Behaviour 46: a cache that is full of evictable blocks never takes a worker out of routing."""
    full_cache = worker(0, kv_tokens=10_000, kv_protected=0, sketch_blocks=10_000 // 64)
    assert ineligible_reason(full_cache, request(9_000)) == ""


def test_matched_blocks_need_no_room() -> None:
    nearly_full = worker(0, kv_tokens=10_000, kv_protected=9_500)
    assert ineligible_reason(nearly_full, request(1_000, [0])) == "kv-full"
    assert ineligible_reason(nearly_full, request(1_000, [8])) == ""


def test_when_nobody_has_room_all_that_serve_are_eligible() -> None:
    full = [worker(slot, kv_tokens=1_000, kv_protected=999) for slot in range(3)]
    down = worker(3, connected=False)
    assert eligible(request(500), [*full, down]) == full
    roomy = worker(4, kv_tokens=1_000)
    assert eligible(request(500), [*full, down, roomy]) == [roomy]
    assert eligible(request(500), [down]) == []


def test_uncached_tokens_are_at_least_one() -> None:
    view = request(128, [0, 1, 2])
    assert [view.matched_tokens(slot) for slot in range(3)] == [0, 64, 127]
    assert [view.uncached_tokens(slot) for slot in range(3)] == [128, 64, 1]


def test_places_short() -> None:
    assert worker(0, running=7, max_running=8).places_short == 0
    assert worker(0, running=8, max_running=8).places_short == 1
    assert worker(0, running=8, waiting=3, max_running=8).places_short == 4
    assert worker(0, running=100).places_short == 0, "how many it can run is not known"


def test_order_begins_with_the_chosen_worker() -> None:
    assert Ranking(2, "load", {0: 3.0, 1: 1.0, 2: 2.0}).order == [2, 1, 0]
    assert NOBODY.order == []

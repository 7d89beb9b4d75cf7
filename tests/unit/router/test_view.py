"""Who may get a request, and what the snapshots work out."""

from __future__ import annotations

import pytest

from radixfleet.types import WorkerStatus
from router.view import NOBODY, Ranking, eligible
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
        (worker(0, kv_tokens=2_000, kv_protected=2_000), ""),
    ],
)
def test_each_reason_has_a_name(view, reason: str) -> None:
    assert view.unavailable == reason
    assert eligible([view]) == ([] if reason else [view])


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

"""Who is tried first."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.sim_worker import make_submit
from worker.scheduling.limits import Order
from worker.scheduling.queue import WINDOW, WaitingQueue
from worker.scheduling.request import Request


def make_queue(order: Order, max_overtakes: int = 3) -> WaitingQueue:
    return WaitingQueue(order, max_overtakes)


def make_request(arrival: int, *, priority: int = 0) -> Request:
    submit = make_submit(arrival, [1, 2, 3], priority=priority)
    return Request(submit, arrival=arrival, fill_ids=submit.token_ids)


def order_of(queue: WaitingQueue, cached: dict[int, int] | None = None) -> list[int]:
    return [
        request.arrival
        for request in queue.candidates(lambda request: (cached or {}).get(request.arrival, 0), len(queue))
    ]


def test_fcfs_is_the_order_of_arrival() -> None:
    queue = make_queue("fcfs")
    for arrival in (3, 1, 2):
        queue.push(make_request(arrival, priority=arrival))
    assert order_of(queue, {3: 100}) == [1, 2, 3]


def test_priority_goes_before_arrival() -> None:
    queue = make_queue("priority")
    for arrival, priority in ((1, 0), (2, 5), (3, -1), (4, 5)):
        queue.push(make_request(arrival, priority=priority))
    assert order_of(queue) == [2, 4, 1, 3]


def test_lpm_takes_the_longest_cached_prefix_and_breaks_ties_by_arrival() -> None:
    queue = make_queue("lpm")
    for arrival in range(1, 6):
        queue.push(make_request(arrival))
    assert order_of(queue, {2: 10, 4: 30, 5: 10}) == [4, 2, 5, 1, 3]


@pytest.mark.parametrize("order", ["fcfs", "lpm", "priority"])
def test_a_retracted_request_goes_first(order: Order) -> None:
    queue = make_queue(order)
    queue.push(make_request(1, priority=9))
    back = make_request(2)
    back.was_admitted = True
    queue.push(back)
    assert order_of(queue, {1: 50}) == [2, 1]


def test_lpm_lets_nobody_be_overtaken_for_ever() -> None:
    """Behaviour 20: a cold request waits for a bounded number of warm ones that came later."""
    queue = make_queue("lpm", max_overtakes=3)
    cold = make_request(1)
    queue.push(cold)
    admitted_before = 0
    for arrival in range(2, 100):
        queue.push(make_request(arrival))
        best = queue.candidates(lambda request: 0 if request is cold else 500, 1)[0]
        queue.take(best)
        if best is cold:
            break
        admitted_before += 1
    assert admitted_before == 3


def test_lpm_bounds_the_wait_of_every_cold_request() -> None:
    """Behaviour 20, with many cold requests and an endless stream of warm ones."""
    queue = make_queue("lpm", max_overtakes=2)
    for arrival in range(1, 11):
        queue.push(make_request(arrival))
    order: list[int] = []
    for arrival in range(11, 200):
        queue.push(make_request(arrival))
        best = queue.candidates(lambda request: 0 if request.arrival <= 10 else 500, 1)[0]
        queue.take(best)
        order.append(best.arrival)
    assert max(order.index(arrival) for arrival in range(1, 11)) <= 10 + 2


def test_lpm_looks_at_a_window_of_the_oldest_only() -> None:
    queue = make_queue("lpm")
    for arrival in range(1, 4 * WINDOW):
        queue.push(make_request(arrival))
    looked_up: list[int] = []

    def cached_tokens(request: Request) -> int:
        looked_up.append(request.arrival)
        return request.arrival

    assert [request.arrival for request in queue.candidates(cached_tokens, 1)] == list(range(WINDOW, 0, -1))
    assert looked_up == list(range(1, WINDOW + 1))


def test_taking_out_any_request_keeps_the_others_in_order() -> None:
    random = np.random.default_rng(1)
    queue = make_queue("priority")
    requests = [make_request(arrival, priority=int(random.integers(0, 3))) for arrival in range(50)]
    for request in requests:
        queue.push(request)
    for request in random.permutation(np.array(requests, dtype=object))[:30]:
        queue.remove(request)
        requests.remove(request)
    expected = sorted(requests, key=lambda request: (-request.submit.priority, request.arrival))
    assert [request.arrival for request in expected] == order_of(queue)
    assert len(queue) == 20
    assert set(queue) == set(requests)

"""Who is tried first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.sim_worker import make_submit
from worker.memory.page_allocator import PageAllocator
from worker.memory.radix_cache import RadixCache
from worker.memory.req_to_token import ReqToTokenPool
from worker.scheduling.holdings import Holding, Holdings
from worker.scheduling.limits import Order
from worker.scheduling.queue import WINDOW, WaitingQueue
from worker.scheduling.request import Request, State


def make_queue(order: Order, max_overtakes: int = 3) -> WaitingQueue:
    return WaitingQueue(order, max_overtakes)


def make_request(arrival: int, *, priority: int = 0) -> Request:
    submit = make_submit(arrival, [1, 2, 3], priority=priority)
    return Request(submit, arrival=arrival, fill_ids=submit.token_ids)


def candidates(queue: WaitingQueue, most: int, cached_tokens: Callable[[Request], int]) -> list[Request]:
    def look_up(request: Request) -> None:
        request.expected_cached = cached_tokens(request)

    return queue.candidates(most, look_up)


def order_of(queue: WaitingQueue, cached: dict[int, int] | None = None) -> list[int]:
    found = candidates(queue, len(queue), lambda request: (cached or {}).get(request.arrival, 0))
    return [request.arrival for request in found]


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
        best = candidates(queue, 1, lambda request: 0 if request is cold else 500)[0]
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
        best = candidates(queue, 1, lambda request: 0 if request.arrival <= 10 else 500)[0]
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

    assert [request.arrival for request in candidates(queue, 1, cached_tokens)] == list(range(WINDOW, 0, -1))
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


class TestHolding:
    """Requests that wait for a prefix which another is computing keep their places and cost a step nothing."""

    @staticmethod
    def held(queue: WaitingQueue, arrival: int, other: Request, until: int) -> Request:
        request = make_request(arrival)
        queue.push(request)
        request.waits_for = (other, until)
        queue.hold(request)
        return request

    @staticmethod
    def computing() -> tuple[Request, Holding]:
        """A request that is being computed, and what it holds."""
        other = make_request(1)
        allocator = PageAllocator(9, 4)
        holdings = Holdings(allocator, ReqToTokenPool(1, 64, 4), RadixCache(allocator))
        handle = holdings.cache.lock(holdings.cache.match(("m",), other.fill_ids))
        holding = holdings.open(handle, np.empty(0, dtype=np.int32), 3)
        assert holding is not None
        other.seat(holding)
        return other, holding

    @pytest.mark.parametrize("order", ["fcfs", "lpm", "priority"])
    def test_who_is_held_is_not_tried_but_counts_as_waiting(self, order: Order) -> None:
        queue, (other, _) = make_queue(order), self.computing()
        first = self.held(queue, 2, other, 3)
        queue.push(make_request(3))
        assert (order_of(queue), len(queue), queue.has_candidates) == ([3], 2, True)
        assert set(queue) >= {first}

    def test_each_goes_on_when_what_it_waits_for_is_there(self) -> None:
        queue, (other, _) = make_queue("fcfs"), self.computing()
        early, late = self.held(queue, 2, other, 1), self.held(queue, 3, other, 3)
        queue.push(make_request(4))
        queue.let_go()
        assert order_of(queue) == [4]
        other.settled = 2
        queue.let_go()
        assert order_of(queue) == [2, 4], "in its old place"
        assert (early.waits_for, early.has_waited, late.has_waited) == (None, True, False)
        other.settled = 3
        queue.let_go()
        assert order_of(queue) == [2, 3, 4]

    @pytest.mark.parametrize("state", [State.FINISHED, State.RETRACTED])
    def test_all_go_on_when_it_is_computed_no_more(self, state: State) -> None:
        queue, (other, _) = make_queue("lpm"), self.computing()
        for arrival in (2, 3):
            self.held(queue, arrival, other, 3)
        other.state = state
        queue.let_go()
        assert order_of(queue) == [2, 3]

    def test_who_is_held_can_be_taken_out(self) -> None:
        """Behaviour 5: an abort while it waits."""
        queue, (other, _) = make_queue("fcfs"), self.computing()
        gone, kept = self.held(queue, 2, other, 3), self.held(queue, 3, other, 3)
        queue.remove(gone)
        assert set(queue) == {kept}
        queue.remove(kept)
        assert len(queue) == 0
        other.settled = 3
        queue.let_go()
        assert order_of(queue) == []

    def test_a_step_looks_at_none_of_those_that_wait_for_the_same(self) -> None:
        """A burst of a thousand siblings costs the steps until then one look together."""
        queue, (other, _) = make_queue("fcfs"), self.computing()
        looks = []

        class Watched(Request):
            @property
            def is_seated(self) -> bool:
                looks.append(self.uid)
                return True

        watched = Watched(other.submit, arrival=1, fill_ids=other.fill_ids)
        for arrival in range(2, 1_002):
            self.held(queue, arrival, watched, 3)
        queue.let_go()
        assert looks == [1]

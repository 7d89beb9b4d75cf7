"""Waiting requests of high priority take the place of running ones of lower priority, when that is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.sim_worker import SimWorker, make_submit


def worker_of(**sizes: int) -> SimWorker:
    return SimWorker(order="priority", preempt=True, **sizes)


def prompt(uid: int, length: int = 8) -> np.ndarray:
    return np.random.default_rng(uid).integers(0, 50, length)


def steps_until_admitted(worker: SimWorker, uid: int, *, in_flight: int) -> int:
    for steps in range(1, 100):
        worker.step(in_flight=in_flight)
        if worker.state(uid).admissions:
            return steps
    raise AssertionError(f"request {uid} is not admitted")


@pytest.mark.parametrize("in_flight", [1, 2])
class TestPreemption:
    """Each run ends with the tokens of an uninterrupted one: nothing is lost or repeated."""

    def finish(self, worker: SimWorker, *, in_flight: int) -> None:
        worker.run(in_flight=in_flight)
        worker.assert_idle()
        for uid in worker.told:
            worker.assert_tokens(uid)

    def test_for_want_of_a_row_the_newest_of_the_lowest_priority_leaves(self, in_flight: int) -> None:
        worker = worker_of(max_running=3)
        for uid, priority in ((1, 1), (2, 0), (3, 0)):
            worker.submit(make_submit(uid, prompt(uid), 30, priority=priority))
        for _ in range(5):
            worker.step(in_flight=in_flight)
        before = {uid: len(worker.state(uid).tokens) for uid in (1, 2, 3)}
        worker.submit(make_submit(4, prompt(4), 20, priority=2))
        assert steps_until_admitted(worker, 4, in_flight=in_flight) <= 2 + in_flight
        for _ in range(10):
            worker.step(in_flight=in_flight)
        assert worker.scheduler.counters.preemptions == worker.scheduler.counters.retractions == 1
        gained = {uid: len(worker.state(uid).tokens) - before[uid] for uid in (1, 2, 3)}
        assert gained[1] > 8
        assert gained[2] > 8
        assert gained[3] <= 1 + in_flight
        self.finish(worker, in_flight=in_flight)

    def test_for_want_of_room_as_many_leave_as_it_takes(self, in_flight: int) -> None:
        worker = worker_of(num_pages=28, page_size=4, max_running=8)
        for uid in range(1, 5):
            worker.submit(make_submit(uid, prompt(uid), 16, priority=0))
        for _ in range(4):
            worker.step(in_flight=in_flight)
        worker.submit(make_submit(5, prompt(5, 44), 10, priority=7))
        steps_until_admitted(worker, 5, in_flight=in_flight)
        assert worker.scheduler.counters.preemptions == 2, "it needs 14 of 28 pages, and each of the four others 6"
        self.finish(worker, in_flight=in_flight)

    def test_equals_wait(self, in_flight: int) -> None:
        worker = worker_of(max_running=2)
        for uid in range(1, 5):
            worker.submit(make_submit(uid, prompt(uid), 12, priority=3))
        self.finish(worker, in_flight=in_flight)
        assert worker.scheduler.counters.retractions == 0

    def test_nobody_leaves_for_one_that_would_not_fit_anyway(self, in_flight: int) -> None:
        worker = worker_of(num_pages=24, page_size=4, max_running=8)
        worker.submit(make_submit(1, prompt(1), 24, priority=5))
        worker.submit(make_submit(2, prompt(2), 24, priority=0))
        for _ in range(3):
            worker.step(in_flight=in_flight)
        worker.submit(make_submit(3, prompt(3, 70), 12, priority=5))
        for _ in range(8):
            worker.step(in_flight=in_flight)
        assert worker.scheduler.counters.preemptions == 0
        self.finish(worker, in_flight=in_flight)

    def test_where_running_requests_outgrow_the_pool_the_lowest_priority_leaves_and_not_the_newest(
        self, in_flight: int
    ) -> None:
        worker = worker_of(num_pages=24, page_size=4, max_running=4)
        for _ in range(200):  # as after many requests that ended early: admission counts on almost no growth
            worker.scheduler._admission.growth_share.ended(0.0)
        for uid, priority in ((1, 0), (2, 1), (3, 1)):
            worker.submit(make_submit(uid, prompt(uid), 40, priority=priority))
            steps_until_admitted(worker, uid, in_flight=in_flight)
        while not worker.scheduler.counters.retractions:
            worker.step(in_flight=in_flight)
        assert set(worker.scheduler.running_uids) == {2, 3}
        assert worker.scheduler.counters.preemptions == 0
        self.finish(worker, in_flight=in_flight)

    def test_without_being_asked_nobody_leaves(self, in_flight: int) -> None:
        worker = SimWorker(order="priority", max_running=1)
        worker.submit(make_submit(1, prompt(1), 30, priority=0))
        worker.step(in_flight=in_flight)
        worker.submit(make_submit(2, prompt(2), 4, priority=9))
        self.finish(worker, in_flight=in_flight)
        assert worker.scheduler.counters.retractions == 0

    def test_each_arrival_preempts_at_most_one_for_a_row(self, in_flight: int) -> None:
        """Behaviour 23: no ping-pong, however many come, and who was retracted gets on in the end."""
        worker = worker_of(max_running=2)
        for uid in (1, 2):
            worker.submit(make_submit(uid, prompt(uid), 40, priority=0))
        for uid in range(3, 15):
            for _ in range(4):
                worker.step(in_flight=in_flight)
            worker.submit(make_submit(uid, prompt(uid), 5, priority=1 + uid % 3))
        self.finish(worker, in_flight=in_flight)
        assert 1 <= worker.scheduler.counters.preemptions <= 12
        assert all(worker.state(uid).admissions == 1 for uid in worker.told)

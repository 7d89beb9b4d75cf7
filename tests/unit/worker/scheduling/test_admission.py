"""Who is let in, and when: rows, budget, memory."""

from __future__ import annotations

import numpy as np
import pytest

from radixfleet.types import Load
from tests.support.sim_worker import SimWorker, make_submit


class TestNeverFits:
    """Behaviour 15: refused at once, whatever stands in front of it, and the queue goes on."""

    @pytest.mark.parametrize(("prompt_tokens", "max_new_tokens"), [(300, 4), (200, 57), (4, 99_999_999), (257, 1)])
    def test_it_is_refused_with_the_numbers(self, prompt_tokens: int, max_new_tokens: int) -> None:
        worker = SimWorker(num_pages=64, page_size=4)
        worker.submit(make_submit(1, np.arange(30), 20))
        worker.submit(make_submit(2, np.zeros(prompt_tokens), max_new_tokens))
        worker.submit(make_submit(3, np.arange(30), 20))
        ended = worker.state(2).ended
        assert ended is not None
        assert (ended.reason, ended.code) == (None, "INVALID_ARGUMENT")
        for number in (prompt_tokens, max_new_tokens, 256):
            assert str(number) in ended.message
        assert worker.scheduler.counters.refused_requests == 1
        worker.run()
        assert worker.scheduler.counters.finished_requests == 2

    @pytest.mark.parametrize(("prompt_tokens", "max_new_tokens"), [(255, 1), (1, 255), (128, 128), (253, 3)])
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_what_just_fits_is_served_to_its_end(self, prompt_tokens: int, max_new_tokens: int, page_size: int) -> None:
        """Behaviour 40."""
        worker = SimWorker(num_pages=256 // page_size, page_size=page_size, chunk=64)
        worker.submit(make_submit(1, np.arange(prompt_tokens), max_new_tokens))
        worker.submit(make_submit(2, np.arange(prompt_tokens) + 1, max_new_tokens))
        worker.run(in_flight=2)
        worker.assert_idle()
        for uid in (1, 2):
            assert len(worker.state(uid).tokens) == max_new_tokens
            worker.assert_tokens(uid)
        assert worker.scheduler.counters.retractions == 0

    @pytest.mark.parametrize("submit", [make_submit(1, [], 5), make_submit(1, [1, 2], 0)])
    def test_an_empty_prompt_or_no_new_tokens_is_refused(self, submit: object) -> None:
        """Behaviour 40."""
        worker = SimWorker()
        worker.submit(submit)
        ended = worker.state(1).ended
        assert ended is not None
        assert ended.code == "INVALID_ARGUMENT"


class TestRows:
    """max_running_requests."""

    def test_no_more_than_the_rows_run(self) -> None:
        worker = SimWorker(max_running=3)
        for uid in range(10):
            worker.submit(make_submit(uid, [uid], 4))
        while worker.scheduler.has_work:
            worker.step(in_flight=2)
            assert worker.scheduler.load().running_requests <= 3
        assert max(plan.num_sequences for plan in worker.plans) == 3

    def test_a_place_is_taken_as_soon_as_the_last_token_is_in_flight(self) -> None:
        """Behaviour 19: on another row, because the last step still reads the first one's."""
        worker = SimWorker(max_running=1)
        worker.submit(make_submit(1, [1], 2))
        worker.submit(make_submit(2, [2], 2))
        worker.launch()
        assert worker.state(2).admissions == 0
        worker.launch()
        plan = worker.launch()
        assert plan is not None
        assert worker.state(2).admissions == 1
        assert [start.row for start in plan.row_starts] != [start.row for start in worker.plans[0].row_starts]
        worker.run()
        worker.assert_idle()

    @pytest.mark.parametrize("in_flight", [1, 2])
    @pytest.mark.parametrize("max_running", [1, 3])
    def test_a_queue_is_served_without_a_lost_step(self, max_running: int, in_flight: int) -> None:
        """Behaviour 19: each request's first step follows its predecessor's last, overlapped too."""
        worker = SimWorker(max_running=max_running)
        for uid in range(5 * max_running):
            # One ends in each step.
            worker.submit(make_submit(uid, [uid, 1], 3 if uid >= max_running else 3 + uid))
        while worker.scheduler.has_work:
            worker.step(in_flight=in_flight)
        assert {plan.num_sequences for plan in worker.plans[: 5 * 3]} == {max_running}

    def test_more_end_at_once_than_there_are_rows_to_spare(self) -> None:
        """Then their successors begin when the rows are free, one step later."""
        worker = SimWorker(num_pages=256, max_running=40, chunk=64)
        for uid in range(80):
            worker.submit(make_submit(uid, [uid], 2))
        while worker.scheduler.has_work:
            worker.step(in_flight=2)
        assert worker.limits.num_rows == 72
        assert [plan.num_sequences for plan in worker.plans] == [40, 40, 32, 40, 8]

    @pytest.mark.parametrize("max_running", [1, 4, 32])
    def test_of_few_requests_all_may_end_at_once(self, max_running: int) -> None:
        """Their successors' first step follows."""
        worker = SimWorker(num_pages=256, max_running=max_running, chunk=64)
        for uid in range(3 * max_running):
            worker.submit(make_submit(uid, [uid], 2))
        while worker.scheduler.has_work:
            worker.step(in_flight=2)
        assert [plan.num_sequences for plan in worker.plans] == [max_running] * 6


class TestMemory:
    """The forecast lets in what fits, and no latched flag keeps out what does."""

    def test_the_peak_over_time_decides(self) -> None:
        """Two that fill the pool in the end leave room for one that is gone by then, and not for a third like them."""
        worker = SimWorker(num_pages=78, page_size=1, chunk=64)
        worker.submit(make_submit(1, np.arange(20), 20))
        worker.submit(make_submit(2, np.arange(20) + 1, 21))
        worker.submit(make_submit(3, np.arange(3) + 2, 5))
        worker.submit(make_submit(4, np.arange(20) + 3, 20))
        worker.submit(make_submit(5, [1], 1))
        worker.launch()
        assert [worker.state(uid).admissions for uid in range(1, 6)] == [1, 1, 1, 0, 0], "nobody passes by"
        worker.run(in_flight=2)
        worker.assert_idle()
        assert worker.scheduler.counters.retractions == 0

    @pytest.mark.parametrize(("num_pages", "fits"), [(50, True), (49, False)])
    def test_the_forecast_is_exact(self, num_pages: int, fits: bool) -> None:
        """The second ends after 10 tokens, when it has 30 and the first 20."""
        worker = SimWorker(num_pages=num_pages, page_size=1, chunk=64)
        worker.submit(make_submit(1, np.arange(10), 21))
        worker.submit(make_submit(2, np.arange(20) + 1, 11))
        worker.launch()
        assert worker.state(2).admissions == fits
        worker.run()
        assert worker.scheduler.counters.retractions == 0

    def test_freed_memory_admits_in_the_next_step(self) -> None:
        """Behaviour 19: by an end, and by an abort."""
        worker = SimWorker(num_pages=10, page_size=4)
        worker.submit(make_submit(1, np.arange(30), 10))
        worker.submit(make_submit(2, np.arange(30) + 1, 10))
        worker.submit(make_submit(3, np.arange(30) + 2, 10))
        for _ in range(10):
            worker.step()
            if not worker.state(1).ended:
                assert worker.state(2).admissions == 0
        assert worker.state(1).ended is not None
        worker.launch()
        assert worker.state(2).admissions == 1
        worker.settle()
        worker.abort(2)
        worker.launch()
        assert worker.state(3).admissions == 1
        worker.run()
        worker.assert_idle()

    def test_cached_prefixes_make_room(self) -> None:
        """A full cache is not a full pool."""
        worker = SimWorker(num_pages=20, page_size=4)
        for uid in range(12):
            worker.submit(make_submit(uid, np.arange(30) + uid, 4))
            worker.run()
        assert worker.scheduler.load().kv_evictable_tokens > 60
        assert worker.scheduler.load().kv_protected_tokens == 0
        worker.assert_idle()

    def test_a_shared_prefix_is_counted_once(self) -> None:
        worker = SimWorker(num_pages=16, page_size=4, chunk=64)
        worker.submit(make_submit(0, np.arange(40), 1))
        worker.run()
        for uid in range(1, 4):
            worker.submit(make_submit(uid, np.append(np.arange(40), uid), 4))
        worker.launch()
        assert [worker.state(uid).cached_tokens for uid in range(1, 4)] == [40, 40, 40]

    def test_taking_too_much_rolls_back_whole(self) -> None:
        """Behaviour 12: a request that finds no pages leaves locks, rows and pages as they were; it is served later."""
        worker = SimWorker(num_pages=16, page_size=4, chunk=64)
        worker.submit(make_submit(0, np.arange(24), 1))
        worker.run()
        worker.submit(make_submit(1, np.arange(30) + 9, 20))
        worker.launch()
        holdings = worker.scheduler.holdings
        before = (holdings.table.free_rows, holdings.used_pages, worker.scheduler.cache.protected_pages)
        worker.submit(make_submit(2, np.append(np.arange(24), [5, 6]), 20))
        worker.launch()
        assert worker.state(2).admissions == 0
        assert (holdings.table.free_rows, worker.scheduler.cache.protected_pages) == (before[0], before[2])
        assert holdings.used_pages == before[1]
        worker.run()
        worker.assert_tokens(2)
        worker.assert_idle()

    def test_a_forecast_that_lets_in_what_has_no_pages_rolls_back_too(self) -> None:
        """Behaviour 12: pages of a request that has ended are still read, and the only other request must wait."""
        worker = SimWorker(num_pages=10, page_size=4, chunk=64)
        worker.submit(make_submit(1, np.arange(30), 6))
        worker.launch()
        worker.abort(1)
        worker.submit(make_submit(2, np.arange(30) + 3, 6))
        assert worker.launch() is None
        assert worker.scheduler.holdings.table.free_rows == worker.limits.num_rows - 1
        worker.settle()
        assert worker.launch() is not None
        worker.run()
        worker.assert_tokens(2)


class TestOrder:
    """The queue's order, through the scheduler."""

    def admitted_order(self, worker: SimWorker) -> list[int]:
        order: list[int] = []
        while worker.scheduler.has_work:
            worker.step()
            order += [uid for uid, told in worker.told.items() if told.admissions and uid not in order]
        return order

    def test_fcfs(self) -> None:
        worker = SimWorker(max_running=1)
        for uid in (3, 1, 2):
            worker.submit(make_submit(uid, [uid], 2, priority=uid))
        assert self.admitted_order(worker) == [3, 1, 2]

    def test_priority(self) -> None:
        worker = SimWorker(max_running=1, order="priority")
        for uid, priority in ((1, 0), (2, 2), (3, 1), (4, 2)):
            worker.submit(make_submit(uid, [uid], 2, priority=priority))
        assert self.admitted_order(worker) == [2, 4, 3, 1]

    def test_lpm(self) -> None:
        worker = SimWorker(max_running=1, order="lpm")
        worker.submit(make_submit(0, np.arange(32), 1))
        worker.run()
        worker.submit(make_submit(1, [40, 41, 42], 2))
        worker.submit(make_submit(2, np.append(np.arange(16), [9]), 2))
        worker.submit(make_submit(3, np.append(np.arange(32), [9]), 2))
        assert self.admitted_order(worker)[1:] == [3, 2, 1]

    def test_lpm_serves_a_cold_request_in_bounded_time(self) -> None:
        """Behaviour 20: warm requests keep coming, two for each that ends."""
        worker = SimWorker(max_running=1, order="lpm", max_overtakes=5)
        worker.submit(make_submit(0, np.arange(32), 1))
        worker.run()
        worker.submit(make_submit(1, [40, 41, 42], 1))
        for first in range(2, 42, 2):
            if worker.state(1).admissions:
                break
            for uid in (first, first + 1):
                worker.submit(make_submit(uid, np.append(np.arange(32), uid), 1))
            worker.step()
        served = [told for other, told in worker.told.items() if other > 1 and told.admissions]
        assert len(served) == 5


class TestLoad:
    """What a worker reports of itself."""

    def test_it_follows_a_request_through_its_life(self) -> None:
        worker = SimWorker(num_pages=64, page_size=4, chunk=16)
        assert worker.scheduler.load() == Load()
        worker.submit(make_submit(1, np.arange(40), 3))
        assert worker.scheduler.load() == Load(waiting_requests=1, outstanding_prompt_tokens=40)
        worker.step()
        assert worker.scheduler.load() == Load(running_requests=1, outstanding_prompt_tokens=24, kv_protected_tokens=40)
        worker.step()
        worker.step()
        assert worker.scheduler.load().outstanding_prompt_tokens == 0
        worker.run()
        assert worker.scheduler.load() == Load(kv_evictable_tokens=40)

    def test_cached_tokens_are_not_outstanding(self) -> None:
        worker = SimWorker(num_pages=64, page_size=4, chunk=64, max_running=1)
        worker.submit(make_submit(1, np.arange(40), 1))
        worker.run()
        worker.submit(make_submit(2, np.append(np.arange(40), [1, 2]), 3))
        assert worker.scheduler.load().outstanding_prompt_tokens == 2
        worker.launch()
        assert worker.scheduler.load().outstanding_prompt_tokens == 2
        worker.settle()
        assert worker.scheduler.load().outstanding_prompt_tokens == 0
        worker.submit(make_submit(3, np.arange(20) + 7, 3))
        assert worker.scheduler.load().outstanding_prompt_tokens == 20
        worker.abort(3)
        assert worker.scheduler.load().outstanding_prompt_tokens == 0

    def test_a_prefix_that_another_is_computing_is_outstanding_once(self) -> None:
        """Behaviour 45: siblings that wait for it are no more work than their own tails."""
        worker = SimWorker(num_pages=64, page_size=4, chunk=64, shared_prefix_tokens=8)
        for uid in (1, 2, 3):
            worker.submit(make_submit(uid, np.append(np.arange(40), uid), 1))
        assert worker.scheduler.load().outstanding_prompt_tokens == 3 * 41
        worker.launch()
        assert worker.scheduler.load().waiting_requests == 2
        assert worker.scheduler.load().outstanding_prompt_tokens == 41 + 1 + 1

    def test_times_of_admission_come_from_the_clock(self) -> None:
        worker = SimWorker()
        worker.clock.advance(12.5)
        worker.scheduler.submit(make_submit(1, [1, 2], 2))
        worker.scheduler.plan()
        outputs = worker.scheduler.drain()
        assert outputs is not None
        assert [admitted.at_s for admitted in outputs.admitted] == [12.5]
        assert worker.scheduler.drain() is None

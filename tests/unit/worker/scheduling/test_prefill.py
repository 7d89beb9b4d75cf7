"""Chunks, and waiting for a prefix that is being computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.sim_worker import SimWorker, make_submit
from worker.scheduling.prefill import chunk_length, enough_tokens


@pytest.mark.parametrize(
    ("start", "end", "budget", "is_first", "length"),
    [
        (0, 10, 64, True, 10),
        (0, 64, 64, True, 64),
        (0, 65, 64, True, 64),
        (0, 100, 70, True, 64),
        (16, 100, 70, False, 64),
        (3, 100, 20, True, 13),
        (0, 100, 5, True, 5),
        (0, 100, 5, False, 0),
        (14, 100, 1, False, 0),
        (15, 100, 1, False, 1),
        (96, 100, 4, False, 4),
    ],
)
def test_a_chunk_ends_with_its_prompt_or_at_a_page(
    start: int, end: int, budget: int, is_first: bool, length: int
) -> None:
    assert chunk_length(start, end, budget, 16, is_first=is_first) == length


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunks_cover_a_prompt_without_an_empty_one(page_size: int) -> None:
    """Behaviours 17, 18: for every small prompt and budget the chunks add up, and none is empty."""
    for end, budget in itertools.product(range(1, 50), range(1, 40)):
        start = 0
        while start < end:
            length = chunk_length(start, end, budget, page_size, is_first=True)
            assert 0 < length <= min(budget, end - start)
            start += length
        assert start == end


@pytest.mark.parametrize(
    ("page_size", "chunk", "prompt_tokens"),
    [
        (16, 16, 100),  # a budget of one page
        (16, 4, 100),  # a chunk smaller than a page
        (16, 1, 40),
        (16, 32, 64),  # the prompt an exact multiple of the chunk
        (16, 64, 64),
        (16, 64, 48),  # and of the page
        (16, 64, 65),
        (1, 8, 64),
        (1, 1, 20),
        (16, 4_096, 500),  # chunking off, a long prompt
        (4, 4_096, 1),
    ],
)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_edge_sizes_work(page_size: int, chunk: int, prompt_tokens: int, in_flight: int) -> None:
    """Behaviour 17."""
    worker = SimWorker(num_pages=1_200 // page_size, page_size=page_size, chunk=chunk, max_running=3)
    for uid in range(3):
        prompt = np.arange(prompt_tokens) % 7 + uid
        worker.submit(make_submit(uid, prompt, 5))
    worker.run(in_flight=in_flight)
    worker.assert_idle()
    for uid in range(3):
        worker.assert_tokens(uid)


def test_no_step_computes_more_than_its_budget() -> None:
    worker = SimWorker(num_pages=500, page_size=4, chunk=32, max_running=8)
    random = np.random.default_rng(3)
    for uid in range(30):
        worker.submit(make_submit(uid, random.integers(0, 50, random.integers(1, 120)), 20))
    worker.run(in_flight=2)
    for plan in worker.plans:
        num_decodes = int(plan.relayed.sum())
        assert plan.num_tokens - num_decodes <= worker.limits.prefill_budget(num_decodes)
    assert max(plan.num_tokens for plan in worker.plans) >= 30


def test_a_crumb_of_the_budget_admits_nobody() -> None:
    """Nor does it let a small request pass by."""
    worker = SimWorker(num_pages=64, page_size=4, chunk=32)
    worker.submit(make_submit(1, np.arange(30), 2))
    worker.submit(make_submit(2, np.arange(20) + 9, 2))
    worker.submit(make_submit(3, [1, 2], 2))
    worker.launch()
    assert [worker.state(uid).admissions for uid in (1, 2, 3)] == [1, 0, 0]
    worker.launch()
    assert [worker.state(uid).admissions for uid in (1, 2, 3)] == [1, 1, 1]


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    """Behaviour 21: in every step of a long prompt each running request gets its token, beside one chunk."""
    worker = SimWorker(num_pages=400, page_size=4, chunk=32)
    for uid in range(3):
        worker.submit(make_submit(uid, [uid, 1, 2], 60))
    worker.step()
    worker.submit(make_submit(9, np.arange(600) % 50, 1))
    before = [len(worker.state(uid).tokens) for uid in range(3)]
    for _ in range(15):
        worker.step()
    assert worker.state(9).admissions == 1
    assert worker.state(9).ended is None
    assert [len(worker.state(uid).tokens) for uid in range(3)] == [count + 15 for count in before]
    assert all(plan.num_tokens <= 32 for plan in worker.plans)


class TestSharedPrefix:
    """Requests that need a prefix which another is computing wait for it instead of computing it as well."""

    prefix = np.arange(96) % 47

    def worker(self, *, chunk: int = 512) -> SimWorker:
        return SimWorker(num_pages=400, page_size=4, chunk=chunk, max_running=8, shared_prefix_tokens=16)

    def submit(self, worker: SimWorker, uid: int, max_new_tokens: int = 3, **named: object) -> None:
        worker.submit(make_submit(uid, np.append(self.prefix, [uid, uid + 1]), max_new_tokens, **named))

    def test_siblings_compute_it_once(self) -> None:
        worker = self.worker()
        for uid in range(6):
            self.submit(worker, uid)
        worker.run(in_flight=2)
        assert [worker.state(uid).cached_tokens for uid in range(6)] == [0] + [96] * 5
        assert worker.scheduler.counters.computed_tokens == 98 + 5 * 2 + 6 * 2
        for uid in range(6):
            worker.assert_tokens(uid)

    def test_others_pass_by(self) -> None:
        worker = self.worker()
        self.submit(worker, 0)
        self.submit(worker, 1)
        worker.submit(make_submit(2, [5, 6, 7], 3))
        worker.launch()
        assert [worker.state(uid).admissions for uid in range(3)] == [1, 0, 1]
        worker.settle_all()
        worker.launch()
        assert worker.state(1).admissions == 1

    def test_they_wait_no_longer_than_for_what_they_share(self) -> None:
        worker = self.worker(chunk=34)
        worker.submit(make_submit(0, np.append(self.prefix[:64], np.arange(42)), 2))
        self.submit(worker, 1)
        for _ in range(3):
            worker.step()
        assert worker.state(1).admissions == 0
        worker.launch()  # the last chunk of one, and the first of the other beside it
        assert worker.state(0).tokens == []
        assert worker.state(1).cached_tokens == 64

    def test_they_wait_once_at_most(self) -> None:
        """2 waits for 0; the next to compute what 2 needs as well is 1, and 2 does not wait for that."""
        worker = self.worker()
        worker.submit(make_submit(0, np.append(self.prefix[:32], 9), 3))
        self.submit(worker, 1)
        self.submit(worker, 2)
        worker.step()
        assert [worker.state(uid).admissions for uid in range(3)] == [1, 0, 0]
        worker.launch()
        assert [worker.state(uid).cached_tokens for uid in range(3)] == [0, 32, 32]

    @pytest.mark.parametrize("ending", ["abort", "failure"])
    def test_they_go_on_alone_when_the_other_ends(self, ending: str) -> None:
        worker = self.worker()
        self.submit(worker, 0)
        self.submit(worker, 1)
        plan = worker.launch()
        assert plan is not None
        assert worker.launch() is not None
        if ending == "abort":
            worker.abort(0)
        else:
            worker.runner.faults.step_errors[plan.step] = "injected"
            worker.settle()
        assert worker.state(1).admissions == 0
        worker.launch()
        assert worker.state(1).cached_tokens == 0
        worker.run()
        worker.assert_tokens(1)
        assert len(worker.state(1).tokens) == 3

    def test_a_namespace_of_its_own_does_not_wait(self) -> None:
        worker = self.worker()
        self.submit(worker, 0)
        self.submit(worker, 1, namespace=("m", "other"))
        worker.launch()
        assert worker.state(1).admissions == 1

    def test_a_short_shared_prefix_is_not_waited_for(self) -> None:
        worker = self.worker()
        worker.submit(make_submit(0, np.append(self.prefix[:15], [1, 2]), 3))
        worker.submit(make_submit(1, np.append(self.prefix[:15], [3, 4]), 3))
        worker.launch()
        assert worker.state(1).admissions == 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_chunks_of_a_traced_prompt_are_told_in_order_and_of_no_other(in_flight: int) -> None:
    """With the times of their steps; what the cache gave was not computed."""
    worker = SimWorker(chunk=8)
    worker.submit(make_submit(1, range(20), 2))
    worker.run(in_flight=in_flight)
    worker.submit(make_submit(2, [*range(20), 30, 31, 32, 33, 34, 35, 36, 37, 38, 39], 3, traced=True))
    chunks = []
    while worker.scheduler.has_work:
        if worker.launch() is None or len(worker.launched) >= in_flight:
            worker.clock.advance(0.25)
            worker.scheduler.commit(worker.runner.run(worker.launched.popleft()))
            outputs = worker.scheduler.drain()
            chunks += outputs.chunks if outputs is not None else []
    assert [(chunk.uid, chunk.start, chunk.num_tokens) for chunk in chunks] == [(2, 20, 8), (2, 28, 2)]
    assert all(chunk.began_s <= chunk.ended_s for chunk in chunks)
    assert chunks[0].ended_s < chunks[1].ended_s


class TestSeveralSteps:
    def test_where_a_step_costs_nothing_known_it_takes_all(self) -> None:
        assert enough_tokens(1 << 20, 0) == np.inf

    def test_the_more_waits_the_larger_the_steps_and_the_smaller_their_share(self) -> None:
        sizes = [enough_tokens(waiting, 64) for waiting in (100, 1_000, 10_000, 100_000)]
        assert sizes == sorted(sizes)
        assert sizes[0] > 64
        assert [size / waiting for size, waiting in zip(sizes, (100, 1_000, 10_000, 100_000), strict=True)] == sorted(
            [size / waiting for size, waiting in zip(sizes, (100, 1_000, 10_000, 100_000), strict=True)], reverse=True
        )

    @pytest.mark.parametrize(("waiting", "cost"), [(448, 64), (4_608, 64), (3_200, 200)])
    def test_the_mean_wait_is_near_the_least_and_little_is_lost(self, waiting: int, cost: int) -> None:
        """In time of tokens: equal steps, one after another, each `cost` longer than its tokens take."""

        def mean_wait(size: float) -> float:
            steps = np.ceil(waiting / size)
            return float((steps + 1) / 2 * (waiting / steps + cost))

        enough = enough_tokens(waiting, cost)
        best = min(mean_wait(waiting / steps) for steps in range(1, 100))
        assert mean_wait(enough) < 1.25 * best
        assert np.ceil(waiting / enough) * cost < np.sqrt(waiting * cost)

    def test_prompts_that_wait_together_are_computed_in_several_steps(self) -> None:
        worker = SimWorker(num_pages=512, max_running=16, chunk=256, step_cost_tokens=8)
        for uid in range(1, 11):
            worker.submit(make_submit(uid, [uid * 10 + place for place in range(10)], 3))
        plan = worker.launch()
        assert plan is not None
        assert plan.num_sequences == 5  # 50 tokens: the first to be more than sqrt(3 * 8 * 100)
        worker.run(in_flight=2)
        for uid in worker.told:
            worker.assert_tokens(uid)

    def test_a_prompt_is_not_cut_for_it(self) -> None:
        worker = SimWorker(num_pages=512, max_running=16, chunk=256, step_cost_tokens=8)
        worker.submit(make_submit(1, list(range(40)) * 5, 1))
        worker.submit(make_submit(2, [7] * 10, 1))
        plan = worker.launch()
        assert plan is not None
        assert plan.lengths.tolist() == [200]

    def test_a_prompt_that_is_begun_and_large_enough_lets_nobody_in_beside_it(self) -> None:
        worker = SimWorker(num_pages=512, max_running=16, chunk=64, step_cost_tokens=2)
        worker.submit(make_submit(1, list(range(40)) * 3, 1))
        first = worker.launch()
        assert first is not None
        worker.submit(make_submit(2, [7] * 8, 1))
        worker.settle()
        second = worker.launch()
        assert second is not None
        assert second.lengths.tolist() == [56]
        worker.settle()
        third = worker.launch()
        assert third is not None
        assert 8 in third.lengths.tolist()
        worker.run(in_flight=2)
        worker.assert_idle()

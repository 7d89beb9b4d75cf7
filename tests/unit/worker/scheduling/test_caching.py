"""What is found in the prefix cache, and what is put there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.sim_worker import SimWorker, make_submit

PROMPT = np.arange(40)


def run_one(worker: SimWorker, uid: int, prompt: np.ndarray, max_new_tokens: int = 4, **named: object) -> int | None:
    worker.submit(make_submit(uid, prompt, max_new_tokens, **named))
    worker.run(in_flight=2)
    worker.assert_tokens(uid)
    return worker.state(uid).cached_tokens


@pytest.mark.parametrize(("page_size", "cached"), [(1, 39), (4, 36), (16, 32)])
def test_a_wholly_cached_prompt_still_computes_its_last_token(page_size: int, cached: int) -> None:
    """Behaviours 18, 28: one chunk, not empty, which samples."""
    worker = SimWorker(num_pages=320 // page_size, page_size=page_size, chunk=64)
    run_one(worker, 1, PROMPT)
    num_plans = len(worker.plans)
    assert run_one(worker, 2, PROMPT) == cached
    first = worker.plans[num_plans]
    assert first.lengths.tolist() == [40 - cached]
    assert first.samples.tolist() == [True]
    assert len(worker.plans) == num_plans + 4


def test_a_cache_hit_that_makes_the_first_chunk_the_last_leaves_no_empty_chunk() -> None:
    """Behaviour 18: the prompt needs three chunks cold and one warm."""
    worker = SimWorker(chunk=16)
    run_one(worker, 1, PROMPT, 1)
    assert len(worker.plans) == 3
    run_one(worker, 2, np.append(PROMPT, [1, 2, 3]), 1)
    assert len(worker.plans) == 4


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_next_turn_finds_the_answer_of_the_last(page_size: int) -> None:
    """Behaviour 26: generated tokens are cached too, all but the last, whose KV was never computed."""
    worker = SimWorker(num_pages=400 // page_size, page_size=page_size, chunk=64)
    run_one(worker, 1, PROMPT, 21)
    turn = np.concatenate([PROMPT, worker.state(1).tokens, [7, 8, 9]])
    assert run_one(worker, 2, turn) == (40 + 20) // page_size * page_size


def test_a_stopped_answer_is_cached_up_to_the_stop_token_where_overlap_computed_it() -> None:
    """Behaviour 26, with a step in flight when the stop token came: its KV is there as well."""
    worker = SimWorker(page_size=1, num_pages=200)
    probe = SimWorker(page_size=1, num_pages=200)
    run_one(probe, 1, PROMPT, 5)
    stop = probe.state(1).tokens[3]
    assert stop not in probe.state(1).tokens[:3]
    run_one(worker, 1, PROMPT, 20, stop_token_ids=(stop,))
    assert run_one(worker, 2, np.concatenate([PROMPT, worker.state(1).tokens, [9]])) == 44


def test_who_answers_at_once_finds_the_answer_while_a_step_after_its_stop_token_is_computed() -> None:
    """Behaviour 26: of an agent's next turn, planned before that step has settled. All but the stop token's KV."""
    worker = SimWorker(page_size=1, num_pages=200)
    probe = SimWorker(page_size=1, num_pages=200)
    run_one(probe, 1, PROMPT, 5)
    worker.submit(make_submit(1, PROMPT, 20, stop_token_ids=(probe.state(1).tokens[3],)))
    worker.launch()
    while worker.state(1).ended is None:
        worker.launch()
        worker.settle()
    turn = np.concatenate([PROMPT, worker.state(1).tokens, [9]])
    worker.submit(make_submit(2, turn, 2))
    worker.launch()
    worker.run()
    assert worker.state(2).cached_tokens == 43
    worker.assert_tokens(2)
    worker.assert_idle()


def test_namespaces_share_nothing() -> None:
    """Behaviour 27: neither equal prompts nor names whose concatenations are equal."""
    worker = SimWorker()
    for uid, namespace in enumerate([("m", "ab"), ("ma", "b"), ("m", "ab", ""), ("mab",), ()]):
        assert run_one(worker, uid, PROMPT, namespace=namespace) == 0
    assert run_one(worker, 9, PROMPT, namespace=("m", "ab")) == 36


def test_a_chunk_neither_matches_nor_locks_a_second_time() -> None:
    """Behaviour 11: one admission, one lock, however many chunks; nothing stays locked afterwards."""
    worker = SimWorker(chunk=8)
    run_one(worker, 1, PROMPT[:20], 1)
    worker.submit(make_submit(2, PROMPT, 2))
    locked = []
    while worker.scheduler.has_work:
        worker.step()
        nodes = [node for node in worker.scheduler.cache.nodes() if node.parent is not None]
        locked.append(max(node.locks for node in nodes))
    assert worker.state(2).admissions == 1
    assert worker.state(2).cached_tokens == 20
    assert max(locked) == 1
    assert len([plan for plan in worker.plans if plan.row_starts]) == 2


def test_chunks_can_be_shared_as_soon_as_they_have_settled() -> None:
    worker = SimWorker(chunk=16, shared_prefix_tokens=1_000, num_pages=100)
    worker.submit(make_submit(1, np.arange(50), 2))
    worker.step()
    worker.step()
    worker.step()
    worker.submit(make_submit(2, np.append(np.arange(40), 49), 2))
    worker.run()
    assert worker.state(2).cached_tokens == 40


def test_a_launched_chunk_is_not_shared_before_it_has_settled() -> None:
    worker = SimWorker(chunk=64, shared_prefix_tokens=1_000, num_pages=100)
    worker.submit(make_submit(1, PROMPT, 2))
    worker.launch()
    worker.submit(make_submit(2, PROMPT, 2))
    worker.launch()
    assert worker.state(2).cached_tokens == 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_two_that_compute_the_same_keep_their_own_copy_to_the_end(in_flight: int) -> None:
    """The second copy is counted as its request's own, and freed with it."""
    worker = SimWorker(chunk=128, shared_prefix_tokens=1_000, num_pages=100)
    for uid in range(3):
        worker.submit(make_submit(uid, PROMPT, 3 + uid))
    worker.step(in_flight=in_flight)
    worker.step(in_flight=in_flight)
    assert worker.scheduler.cache.total_pages == 10
    assert worker.scheduler.holdings.used_pages >= 30
    worker.run(in_flight=in_flight)
    worker.assert_idle()
    for uid in range(3):
        worker.assert_tokens(uid)
    assert worker.scheduler.cache.total_pages == 11


class TestFlush:
    """Behaviour 29: a flush is defined with requests in any state, and nothing stale is ever served."""

    def test_an_idle_cache_is_emptied(self) -> None:
        worker = SimWorker()
        run_one(worker, 1, PROMPT)
        assert worker.flush() == (40, 0)
        assert run_one(worker, 2, PROMPT) == 0

    def test_a_running_request_keeps_what_it_uses(self) -> None:
        worker = SimWorker()
        run_one(worker, 1, PROMPT)
        run_one(worker, 2, PROMPT + 1)
        worker.submit(make_submit(3, PROMPT, 4))
        worker.launch()
        flushed, kept = worker.flush()
        assert flushed == 40 + 4
        assert kept == 40
        worker.run(in_flight=2)
        worker.assert_tokens(3)
        assert run_one(worker, 4, PROMPT) == 36

    def test_what_waits_computes_anew(self) -> None:
        worker = SimWorker(max_running=1)
        run_one(worker, 1, PROMPT)
        worker.submit(make_submit(2, PROMPT + 3, 4))
        worker.submit(make_submit(3, PROMPT, 4))
        worker.launch()
        worker.flush()
        worker.run(in_flight=2)
        assert worker.state(3).cached_tokens == 0
        worker.assert_tokens(3)


def test_block_events_tell_what_came_and_went() -> None:
    worker = SimWorker(num_pages=200)
    worker.submit(make_submit(1, np.arange(200) % 41, 1))
    worker.run()
    evicted, added = worker.scheduler.cache.block_events.drain()
    assert (len(evicted), len(added)) == (0, 3)
    worker.flush()
    evicted_now, added_now = worker.scheduler.cache.block_events.drain()
    assert evicted_now.tolist() == added.tolist()
    assert len(added_now) == 0

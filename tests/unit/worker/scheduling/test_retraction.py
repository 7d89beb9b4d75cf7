"""Running out of pages: who gives way, what it loses (time), and what it does not (tokens)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.sim_worker import SimWorker, make_submit, reference


def overcommitted(worker: SimWorker) -> SimWorker:
    """Let admission count on almost no growth, as after many requests that ended early."""
    for _ in range(200):
        worker.scheduler._admission.growth_share.ended(0.0)
    return worker


def crowd(worker: SimWorker, num_requests: int, max_new_tokens: int, prompt_tokens: int = 12) -> None:
    for uid in range(num_requests):
        worker.submit(make_submit(uid, (np.arange(prompt_tokens) * 3 + uid) % 50, max_new_tokens))


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_near_full_no_token_is_lost_or_repeated(page_size: int, in_flight: int) -> None:
    """Behaviours 9, 22, 23: retracted with tokens in flight, each request gives what an undisturbed run gives."""
    worker = overcommitted(SimWorker(num_pages=160 // page_size, page_size=page_size, max_running=8))
    crowd(worker, 8, max_new_tokens=60)
    worker.run(in_flight=in_flight)
    worker.assert_idle()
    for uid in range(8):
        assert len(worker.state(uid).tokens) == 60
        worker.assert_tokens(uid)
    assert worker.scheduler.counters.retractions > 0


def test_min_new_tokens_counts_from_the_prompt_also_after_a_retraction() -> None:
    worker = overcommitted(SimWorker(num_pages=40, page_size=4, max_running=8, vocab_size=6))
    for uid in range(8):
        prompt = (np.arange(12) + uid) % 6
        worker.submit(make_submit(uid, prompt, 60, min_new_tokens=30, stop_token_ids=(0, 1)))
    worker.run(in_flight=2)
    assert worker.scheduler.counters.retractions > 0
    for uid in range(8):
        assert len(worker.state(uid).tokens) > 30
        worker.assert_tokens(uid)


def test_nobody_is_retracted_for_a_page_that_is_about_to_be_free() -> None:
    """The last token of 0 is in flight when 2, the newest, needs a page: it skips one step."""
    worker = overcommitted(SimWorker(num_pages=11, page_size=4, max_running=3, chunk=64))
    worker.submit(make_submit(0, np.arange(8), 3))
    worker.submit(make_submit(1, np.arange(12) + 5, 6))
    worker.submit(make_submit(2, np.arange(14) + 9, 8))
    for _ in range(4):
        worker.step(in_flight=2)
    assert worker.scheduler.counters.admitted_requests == 3
    assert worker.scheduler.counters.stalled_decodes == 1
    worker.run(in_flight=2)
    worker.assert_idle()
    assert worker.scheduler.counters.retractions == 0
    for uid in range(3):
        worker.assert_tokens(uid)


@pytest.mark.parametrize("follows_another", [False, True])
def test_nor_for_pages_that_an_ended_answer_has_left_in_the_cache(*, follows_another: bool) -> None:
    """A step of it is in flight, so they are locked still. 1 and 2 need a page at once, and skip one step.

    `follows_another`: what it found in the cache at its beginning is locked by it alone, too.
    """
    worker = overcommitted(SimWorker(num_pages=11, page_size=4, max_running=3, chunk=64))
    if follows_another:
        worker.submit(make_submit(9, np.arange(8), 1))
        worker.run(in_flight=1)
    answer = make_submit(0, np.arange(8), 20)
    third = reference(answer, worker.vocab_size)[0][2]
    worker.submit(msgspec.structs.replace(answer, stop_token_ids=(third,)))
    worker.submit(make_submit(1, np.arange(13) + 5, 8))
    worker.submit(make_submit(2, np.arange(13) + 9, 8))
    worker.run(in_flight=2)
    worker.assert_idle()
    assert len(worker.state(0).tokens) == 3
    assert (worker.scheduler.counters.stalled_decodes, worker.scheduler.counters.retractions) == (2, 0)
    for uid in range(1, 3):
        worker.assert_tokens(uid)


def test_a_retraction_waits_for_what_is_in_flight() -> None:
    """Behaviours 2, 9: its pages are released when its steps have settled, and the token in flight counts."""
    worker = overcommitted(SimWorker(num_pages=8, page_size=4, max_running=2))
    crowd(worker, 2, max_new_tokens=16)
    while not worker.scheduler.counters.retractions:
        worker.launch()
        if len(worker.launched) == 2:
            worker.settle()
    newest = worker.scheduler._lifecycle.requests[1]
    assert newest.in_flight > 0
    before = len(worker.state(1).tokens)
    worker.settle_all()
    assert newest.holding is None
    assert len(worker.state(1).tokens) > before
    assert newest.fill_ids.tolist() == [*worker.submits[1].token_ids.tolist(), *worker.state(1).tokens]
    worker.run()
    worker.assert_tokens(1)


def test_the_newest_gives_way_and_comes_back_first() -> None:
    worker = overcommitted(SimWorker(num_pages=12, page_size=4, max_running=3))
    crowd(worker, 4, max_new_tokens=20)
    while not worker.scheduler.counters.retractions:
        worker.step()
    assert worker.scheduler._lifecycle.requests[2].holding is None
    assert worker.scheduler._lifecycle.requests[0].holding is not None
    while worker.state(3).admissions == 0:
        worker.step()
        if worker.state(3).admissions:
            returned = worker.scheduler._lifecycle.requests.get(2)
            assert returned is None or returned.holding is not None
    worker.run()
    assert all(told.admissions == 1 for told in worker.told.values()), "told of one admission only"


def test_the_oldest_is_never_retracted() -> None:
    worker = overcommitted(SimWorker(num_pages=10, page_size=2, max_running=4))
    crowd(worker, 4, max_new_tokens=8, prompt_tokens=4)
    turns = 0
    while worker.state(0).ended is None:
        worker.step()
        turns += 1
        assert worker.state(0).ended is not None or worker.scheduler._lifecycle.requests[0].holding is not None
    assert turns == 8
    assert worker.scheduler.counters.retractions > 0


def test_no_ping_pong_and_throughput_recovers() -> None:
    """Behaviour 23: after a retraction admission counts on all growth for a while, so few retractions follow."""
    worker = overcommitted(SimWorker(num_pages=100, page_size=4, max_running=16, chunk=64, check_each_act=False))
    crowd(worker, 60, max_new_tokens=40)
    worker.run(in_flight=2)
    worker.assert_idle()
    counters = worker.scheduler.counters
    assert 0 < counters.retractions <= 12
    lost = counters.computed_tokens - (60 * (12 + 39))
    assert lost < 0.1 * counters.computed_tokens
    mean_batch = counters.generated_tokens / len(worker.plans)
    assert mean_batch > 6, "of the 8 requests that the pool holds at their full length"


def test_what_was_computed_is_found_again() -> None:
    """A retracted request recomputes only what was evicted meanwhile."""
    worker = overcommitted(SimWorker(num_pages=12, page_size=4, max_running=2))
    worker.submit(make_submit(0, np.arange(20), 20))
    worker.submit(make_submit(1, np.arange(20) + 9, 20))
    worker.run(in_flight=2)
    counters = worker.scheduler.counters
    assert counters.retractions == 1
    assert counters.computed_tokens - 2 * 39 < 24
    for uid in (0, 1):
        worker.assert_tokens(uid)


def test_one_that_is_prefilling_can_be_retracted() -> None:
    worker = overcommitted(SimWorker(num_pages=10, page_size=4, max_running=2, chunk=8))
    worker.submit(make_submit(0, np.arange(8), 28))
    worker.step()
    for _ in range(3):
        worker.step()
    worker.submit(make_submit(1, np.arange(24) + 5, 4))
    worker.run(in_flight=2)
    worker.assert_idle()
    for uid in (0, 1):
        worker.assert_tokens(uid)


def test_abort_of_a_retracted_request_in_either_half() -> None:
    """Behaviour 1: while its last steps are in flight, and when it is back in the queue."""
    for waits_for_settling in (True, False):
        worker = overcommitted(SimWorker(num_pages=8, page_size=4, max_running=2))
        crowd(worker, 2, max_new_tokens=16)
        while not worker.scheduler.counters.retractions:
            worker.launch()
            if len(worker.launched) == 2:
                worker.settle()
        if not waits_for_settling:
            worker.settle_all()
        worker.abort(1)
        worker.run(in_flight=2)
        worker.assert_idle()
        worker.assert_tokens(0)
        assert len(worker.state(0).tokens) == 16


def test_a_failure_of_a_retracted_request() -> None:
    worker = overcommitted(SimWorker(num_pages=8, page_size=4, max_running=2))
    crowd(worker, 2, max_new_tokens=16)
    while not worker.scheduler.counters.retractions:
        worker.launch()
        if len(worker.launched) == 2:
            worker.settle()
    step = worker.launched[0].step
    worker.runner.faults.nan_sequences[step] = {1}
    worker.run(in_flight=2)
    worker.assert_idle()
    ended = worker.state(1).ended
    assert ended is not None
    assert ended.code == "INTERNAL"
    worker.assert_tokens(0)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_one_that_outgrows_the_pool_alone_ends_with_an_error(in_flight: int) -> None:
    """Behaviour 16: it does not loop. (Pages vanish here, as submission refuses what cannot fit.)"""
    worker = SimWorker(num_pages=16, page_size=4, check_each_act=False)
    worker.submit(make_submit(1, np.arange(20), 30))
    worker.submit(make_submit(2, [1, 2], 3))
    for _ in range(3):
        worker.step(in_flight=in_flight)
    stolen = worker.scheduler.cache.allocate(worker.scheduler.cache.available_pages)
    assert stolen is not None
    for _ in range(60):
        worker.step(in_flight=in_flight)
        if worker.state(1).ended is not None and worker.state(2).ended is not None:
            break
    ended = worker.state(1).ended
    assert ended is not None
    assert (ended.reason, ended.code) == (None, "RESOURCE_EXHAUSTED")
    assert "64" in ended.message
    worker.scheduler.holdings.allocator.free(stolen)
    worker.run()
    worker.assert_idle()
    worker.assert_tokens(2)
    assert len(worker.state(2).tokens) == 3

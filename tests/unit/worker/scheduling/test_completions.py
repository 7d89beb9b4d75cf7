"""Several completions of a prompt, log probabilities, ends of grammars, rows with edits: the scheduler's part of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from radixfleet.types import FinishReason
from tests.support.grammars import regex
from tests.support.sim_worker import SimWorker, make_submit
from worker.core.logits import LogitEdits
from worker.core.messages import Child
from worker.scheduling.assembly import Piece
from worker.scheduling.settling import Settling

PROMPT = list(range(1, 41))


def group(num_children: int, **values: object) -> object:
    children = tuple(Child(uid, seed=uid) for uid in range(2, num_children + 2))
    return make_submit(1, PROMPT, 6, temperature=1.0, seed=1, children=children, **values)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("order", ["fcfs", "lpm", "priority"])
def test_children_wait_for_the_prompt_and_then_find_it_in_the_cache(order: str, in_flight: int) -> None:
    """Behaviour 43: the prompt is computed once; every child has its own uid, seed and tokens."""
    worker = SimWorker(order=order, page_size=4, chunk=16, num_pages=128)
    worker.submit(group(3))
    worker.run(in_flight=in_flight)
    worker.assert_idle()
    for uid in range(1, 5):
        worker.assert_tokens(uid)
    assert [worker.told[uid].cached_tokens for uid in range(1, 5)] == [0, 36, 36, 36]
    assert len({tuple(worker.told[uid].tokens) for uid in range(1, 5)}) == 4
    prompt_tokens = sum(int(plan.lengths[~plan.relayed].sum()) for plan in worker.plans)
    assert prompt_tokens == 40 + 3 * 4


def test_a_short_prompt_is_shared_too() -> None:
    """Below the tokens for which strangers wait: there may be 63 children."""
    worker = SimWorker(page_size=4, shared_prefix_tokens=64)
    worker.submit(msgspec.structs.replace(group(2), token_ids=np.arange(10, dtype=np.int32)))
    worker.run()
    assert [worker.told[uid].cached_tokens for uid in (1, 2, 3)] == [0, 8, 8]


def test_children_that_wait_keep_nobody_out_of_the_queues_window() -> None:
    worker = SimWorker(order="lpm", page_size=4, chunk=27, max_running=16, num_pages=256)
    worker.submit(group(40))
    worker.launch()
    worker.submit(make_submit(99, [7] * 5, 2))
    worker.settle()
    worker.launch()
    assert worker.told[2].admissions == 0
    assert worker.told[99].admissions == 1
    worker.run()
    worker.assert_idle()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_children", [0, 1, 3])
def test_completions_that_fit_one_at_a_time_run_one_after_another(num_children: int, in_flight: int) -> None:
    """The prompt ends with a page: each child computes that page again, and there is no room for both copies of it."""
    worker = SimWorker(page_size=16, num_pages=32, chunk=256)
    prompt = np.arange(400) % 50
    children = tuple(Child(uid, seed=uid) for uid in range(2, num_children + 2))
    for first in (1, 101):
        named = tuple(Child(child.uid + first, child.seed) for child in children)
        worker.submit(make_submit(first, prompt, 100, temperature=1.0, seed=1, children=named))
        worker.run(in_flight=in_flight)
    worker.assert_idle()
    for uid, told in worker.told.items():
        assert told.ended.reason is FinishReason.LENGTH, told.ended.message
        worker.assert_tokens(uid)


def test_a_cached_prompt_can_be_told_of_in_a_pool_that_holds_it_once() -> None:
    """Log probabilities of a prompt have it computed whole, beside the copy that the cache has of it."""
    worker = SimWorker(page_size=4, num_pages=12, chunk=16)
    worker.submit(make_submit(1, PROMPT, 8))
    worker.run(in_flight=2)
    worker.submit(make_submit(2, PROMPT, 8, prompt_logprobs=1))
    worker.run(in_flight=2)
    worker.assert_idle()
    assert worker.told[2].ended.reason is FinishReason.LENGTH, worker.told[2].ended.message
    worker.assert_tokens(2)


def test_children_of_one_that_is_aborted_go_on_without_it() -> None:
    worker = SimWorker(page_size=4, chunk=16)
    worker.submit(group(2))
    worker.launch()
    worker.abort(1)
    worker.run()
    worker.assert_idle()
    assert worker.told[1].ended.reason is FinishReason.ABORT
    for uid in (2, 3):
        assert worker.told[uid].ended.reason is FinishReason.LENGTH
        worker.assert_tokens(uid)


def test_a_group_that_can_never_fit_is_refused_as_a_whole() -> None:
    """Behaviour 15: each of its streams hears of it."""
    worker = SimWorker(num_pages=4, page_size=4)
    worker.submit(group(2))
    assert [worker.told[uid].ended.code for uid in (1, 2, 3)] == ["INVALID_ARGUMENT"] * 3
    worker.assert_idle()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_log_probabilities_do_not_depend_on_chunks_cache_or_overlap(chunk: int, in_flight: int) -> None:
    worker = SimWorker(page_size=4, chunk=chunk)
    worker.submit(make_submit(1, PROMPT, 5))
    worker.run(in_flight=in_flight)
    worker.submit(make_submit(2, PROMPT, 5, logprobs=2, prompt_logprobs=3))
    worker.submit(make_submit(3, [*PROMPT, 7, 8], 5, logprobs=0))
    worker.run(in_flight=in_flight)
    for uid in (2, 3):
        worker.assert_tokens(uid)
    assert len(worker.told[2].prompt_logprobs) == 39
    assert worker.told[2].cached_tokens == 0, "such a prompt is computed whole, although it was cached"
    assert worker.told[3].cached_tokens == 40


def test_the_log_probabilities_of_a_prompt_are_told_once_although_it_was_retracted() -> None:
    """Behaviour 23: with retractions in every state of the prompt."""
    retractions = 0
    for num_pages in range(14, 26):
        worker = SimWorker(page_size=4, chunk=8, num_pages=num_pages, max_running=4)
        worker.scheduler._admission.growth_share._mean = 0.0
        worker.submit(make_submit(1, PROMPT[:12], 30, logprobs=1))
        worker.step()
        worker.submit(make_submit(2, PROMPT[12:36], 20, prompt_logprobs=1, logprobs=1))
        worker.run(in_flight=2)
        worker.assert_idle()
        for uid in (1, 2):
            worker.assert_tokens(uid)
        retractions += worker.scheduler.counters.retractions
    assert retractions > 0


@pytest.mark.parametrize("chunk", [1, 3, 39, 40])
def test_a_prompt_may_be_told_of_alone(chunk: int) -> None:
    """Steps in which such a row has nothing to tell, its last chunk and its decodes, are like any others."""
    worker = SimWorker(page_size=1, chunk=chunk)
    worker.submit(make_submit(1, PROMPT, 4, prompt_logprobs=1))
    worker.run(in_flight=2)
    worker.assert_tokens(1)
    assert len(worker.told[1].prompt_logprobs) == 39


def test_a_prompt_of_one_token_has_nothing_to_tell_of() -> None:
    worker = SimWorker(chunk=128)
    worker.submit(make_submit(1, [5], 3, prompt_logprobs=2))
    worker.run()
    worker.assert_tokens(1)
    assert worker.told[1].prompt_logprobs == []


def test_the_end_of_a_grammar_is_a_stop_without_a_token_to_match() -> None:
    """Also where it falls together with the length limit."""
    for max_new_tokens in (3, 9):
        worker = SimWorker(chunk=128)
        worker.submit(make_submit(1, PROMPT, max_new_tokens, edits=LogitEdits(grammar=regex("a"))))
        for step in range(1, 4):
            plan = worker.launch()
            result = worker.runner.run(worker.launched.popleft())
            ended = (0,) if step == 3 else ()
            worker.scheduler.commit(msgspec.structs.replace(result, ended=ended))
            worker._touched.popleft()
            worker._after()
            assert plan is not None
        assert worker.told[1].ended.reason is FinishReason.STOP
        assert worker.told[1].ended.matched_token_id is None
        assert len(worker.told[1].tokens) == 3
        worker.assert_idle()


def test_a_cause_is_what_the_client_hears() -> None:
    """Behaviour 35, of grammars: that request alone."""
    worker = SimWorker(chunk=128)
    worker.submit(make_submit(1, PROMPT, 3))
    worker.submit(make_submit(2, PROMPT[::-1], 3))
    worker.launch()
    result = worker.runner.run(worker.launched.popleft())
    failed = np.arange(len(result.failed)) == 0
    worker.scheduler.commit(
        msgspec.structs.replace(result, failed=failed, causes=((0, "its grammar became too complex"),))
    )
    worker._touched.popleft()
    worker.run()
    assert worker.told[1].ended.code == "INTERNAL"
    assert worker.told[1].ended.message.startswith("its grammar became too complex; other requests go on")
    worker.assert_tokens(2)


def test_the_runner_is_told_what_a_row_asks_for_and_when_it_is_left() -> None:
    edits = LogitEdits(frequency_penalty=1.0)
    worker = SimWorker(chunk=128)
    worker.submit(make_submit(1, PROMPT, 2, edits=edits, logprobs=3))
    worker.submit(make_submit(2, PROMPT[::-1], 4, logprobs=1))
    worker.run()
    first, second = worker.plans[0].row_starts
    assert (first.edits, first.logprobs, first.prompt_logprobs) == (edits, 3, None)
    assert first.history.tolist() == PROMPT
    assert (second.edits, second.logprobs, second.history) == (None, 1, None)
    assert [row for plan in worker.plans for row in plan.left_rows] == [first.row]


def test_after_a_retraction_the_history_has_the_answer_so_far() -> None:
    """Behaviours 23 and 32: from it the runner makes counts and matchers again."""
    worker = SimWorker(page_size=4, num_pages=14, max_running=2)
    worker.scheduler._admission.growth_share._mean = 0.0
    worker.submit(make_submit(1, PROMPT[:8], 30))
    worker.submit(make_submit(2, PROMPT[8:16], 30, edits=LogitEdits(presence_penalty=1.0)))
    worker.run(in_flight=2)
    assert worker.scheduler.counters.retractions > 0
    starts = [start for plan in worker.plans for start in plan.row_starts if start.edits is not None]
    assert len(starts) > 1
    for start in starts:
        answer = start.history[start.prompt_tokens :].tolist()
        assert start.history[: start.prompt_tokens].tolist() == PROMPT[8:16]
        assert answer == worker.told[2].tokens[: len(answer)]
    assert len(starts[-1].history) > 8


def test_what_is_told_of_one_costs_those_beside_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their decodes are settled all at once, as if it were not there."""
    worker = SimWorker(num_pages=60, page_size=4)
    for uid in range(6):
        worker.submit(make_submit(uid, PROMPT[uid:16], 5, logprobs=2 if uid == 3 else None))
    while any(not told.tokens for told in worker.told.values()):
        worker.step()
    settled_singly: list[int] = []
    settle = Settling._settle

    def observed(settling: Settling, piece: Piece, *result: Any, **more: Any) -> None:
        settled_singly.append(piece.request.uid)
        settle(settling, piece, *result, **more)

    monkeypatch.setattr(Settling, "_settle", observed)
    worker.step()
    assert settled_singly == [3]
    worker.run()
    for uid in range(6):
        worker.assert_tokens(uid)

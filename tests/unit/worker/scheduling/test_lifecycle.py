"""From submission to the one outcome: overlap, stopping, aborts, failures, in every state that a request can be in."""

from __future__ import annotations

import numpy as np
import pytest

from radixfleet.types import FinishReason
from tests.support.sim_worker import SimWorker, make_submit, reference
from worker.core.messages import Submit
from worker.core.step import StepResult

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def stopping(uid: int, after: int, max_new_tokens: int = 20, prompt: list[int] = PROMPT) -> Submit:
    """A request whose token number `after` (from 1) is a stop token that did not occur before."""
    tokens, _ = reference(make_submit(uid, prompt, max_new_tokens), 50)
    assert tokens[after - 1] not in tokens[: after - 1], "choose another prompt"
    return make_submit(uid, prompt, max_new_tokens, stop_token_ids=(tokens[after - 1],))


class TestOverlap:
    """Steps are planned before the tokens that they build on are known."""

    @pytest.mark.parametrize("in_flight", [1, 2, 3])
    def test_any_depth_gives_the_same_tokens(self, in_flight: int) -> None:
        worker = SimWorker(num_pages=200, page_size=4, chunk=16)
        random = np.random.default_rng(7)
        for uid in range(20):
            prompt = random.integers(0, 50, random.integers(1, 60))
            temperature = float(uid % 2)
            submit = make_submit(uid, prompt, int(random.integers(1, 20)), temperature=temperature, seed=uid)
            worker.submit(submit)
        worker.run(in_flight=in_flight)
        worker.assert_idle()
        for uid in range(20):
            worker.assert_tokens(uid)

    def test_a_step_is_planned_before_the_token_it_continues_is_known(self) -> None:
        worker = SimWorker()
        worker.submit(make_submit(1, PROMPT, 5))
        first, second, third = worker.launch(), worker.launch(), worker.launch()
        assert first is not None
        assert second is not None
        assert third is not None
        assert first.samples.tolist() == [True]
        assert second.relayed.tolist() == third.relayed.tolist() == [True]
        assert (second.starts.tolist(), third.starts.tolist()) == ([10], [11])
        assert second.input_ids.tolist() == [0]
        assert worker.state(1).tokens == []
        worker.run()
        worker.assert_tokens(1)

    @pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
    def test_an_end_by_length_wastes_no_step(self, max_new_tokens: int) -> None:
        worker = SimWorker()
        worker.submit(make_submit(1, PROMPT, max_new_tokens))
        worker.run(in_flight=2)
        assert len(worker.plans) == max_new_tokens
        assert worker.scheduler.counters.computed_tokens == len(PROMPT) + max_new_tokens - 1
        assert worker.scheduler.counters.discarded_tokens == 0

    def test_nothing_follows_the_end_although_a_step_was_in_flight(self) -> None:
        """Behaviour 4. (`SimWorker` refuses any token after the end.)"""
        worker = SimWorker()
        worker.submit(stopping(1, after=3))
        worker.run(in_flight=2)
        assert len(worker.plans) == 4
        assert len(worker.state(1).tokens) == 3
        assert worker.scheduler.counters.discarded_tokens == 1
        worker.assert_tokens(1)
        worker.assert_idle()

    def test_rows_and_pages_stay_until_no_launched_step_reads_them(self) -> None:
        """Behaviour 2: a request ends by a stop token while one more of its steps is in flight."""
        worker = SimWorker(num_pages=4, page_size=4, max_running=1)
        worker.submit(stopping(1, after=1, max_new_tokens=6))
        worker.submit(make_submit(2, [7, 7, 7], 2))
        worker.launch()
        worker.launch()
        worker.settle()
        assert worker.state(1).ended is not None
        assert worker.scheduler.holdings.table.free_rows == 1
        assert worker.scheduler.holdings.used_pages == 3
        plan = worker.launch()
        assert plan is not None
        assert [start.row for start in plan.row_starts] == [1], "row 0 is still read by step 2"
        assert not set(plan.slots.tolist()) & {slot for step in worker.plans[:2] for slot in step.slots.tolist()}
        worker.settle()
        assert worker.scheduler.holdings.table.free_rows == 1
        worker.run()
        worker.assert_idle()

    def test_results_must_come_in_order(self) -> None:
        worker = SimWorker()
        worker.submit(make_submit(1, PROMPT, 5))
        first, second = worker.launch(), worker.launch()
        assert first is not None
        assert second is not None
        worker.runner.run(first)
        later = worker.runner.run(second)
        with pytest.raises(AssertionError, match="step 2 settles before 1"):
            worker.scheduler.commit(later)


class TestStopping:
    """How a generation ends by itself."""

    def test_a_stop_token_is_told_and_named(self) -> None:
        worker = SimWorker()
        worker.submit(stopping(1, after=4))
        worker.run()
        told = worker.state(1)
        assert told.ended is not None
        assert told.ended.reason is FinishReason.STOP
        assert told.ended.matched_token_id == told.tokens[-1]

    def test_a_stop_token_at_the_length_limit_is_a_stop(self) -> None:
        """Behaviour 33, the scheduler's part."""
        worker = SimWorker()
        worker.submit(stopping(1, after=4, max_new_tokens=4))
        worker.run(in_flight=2)
        told = worker.state(1)
        assert told.ended is not None
        assert (told.ended.reason, len(told.tokens)) == (FinishReason.STOP, 4)
        assert worker.scheduler.counters.discarded_tokens == 0

    @pytest.mark.parametrize("min_new_tokens", [0, 1, 5, 20])
    def test_no_stop_before_min_new_tokens(self, min_new_tokens: int) -> None:
        """Behaviour 33: whatever the runner samples, and it masks stop tokens itself."""
        worker = SimWorker(vocab_size=4)
        stop = (0, 1, 2)
        worker.submit(make_submit(1, PROMPT, 20, min_new_tokens=min_new_tokens, stop_token_ids=stop))
        worker.run(in_flight=2)
        tokens = worker.state(1).tokens
        assert tokens[:min_new_tokens] == [3] * min_new_tokens
        assert len(tokens) >= min_new_tokens
        worker.assert_tokens(1)

    def test_a_stop_token_that_comes_too_early_is_a_token_like_any_other(self) -> None:
        """Behaviour 33: also from a runner that does not mask."""
        worker = SimWorker()
        worker.submit(make_submit(1, PROMPT, 5, min_new_tokens=2, stop_token_ids=(7,)))
        while worker.scheduler.has_work:
            plan = worker.scheduler.plan()
            assert plan is not None
            sevens, fine = np.array([7], dtype=np.int32), np.array([False])
            worker.scheduler.commit(StepResult(plan.step, sevens, fine, 0.0, 0.0))
        outputs = worker.scheduler.drain()
        assert outputs is not None
        assert [output.token_id for output in outputs.outputs] == [7, 7, 7]
        assert [ended.reason for ended in outputs.ended] == [FinishReason.STOP]


class TestAbort:
    """An abort ends a request in whatever state it is, and frees what it holds exactly once."""

    def test_a_queued_request_leaves_at_once(self) -> None:
        """Behaviour 5."""
        worker = SimWorker(max_running=1)
        worker.submit(make_submit(1, PROMPT, 5))
        worker.submit(make_submit(2, PROMPT, 5))
        worker.submit(make_submit(3, PROMPT, 5))
        worker.launch()
        worker.abort(2)
        ended = worker.state(2).ended
        assert ended is not None
        assert ended.reason is FinishReason.ABORT
        assert worker.scheduler.load().waiting_requests == 1
        worker.run()
        worker.assert_idle()
        assert worker.state(2).admissions == 0
        worker.assert_tokens(3)

    @pytest.mark.parametrize("launched", [0, 1, 2, 3])
    @pytest.mark.parametrize("settled", [0, 1, 2, 3])
    @pytest.mark.parametrize("num_tokens", [3, 40])
    def test_in_every_state_it_frees_everything_once(self, launched: int, settled: int, num_tokens: int) -> None:
        """Behaviours 1, 3: with any number of chunks or decodes launched and settled."""
        worker = SimWorker(chunk=16)
        worker.submit(make_submit(1, np.arange(num_tokens), 3))
        for _ in range(launched):
            worker.launch()
        for _ in range(min(settled, len(worker.launched))):
            worker.settle()
        worker.abort(1)
        was_done = worker.state(1).ended
        assert was_done is not None
        worker.abort(1)
        worker.settle_all()
        assert worker.launch() is None
        worker.assert_idle()

    def test_with_its_last_token_in_flight(self) -> None:
        """Behaviour 1."""
        worker = SimWorker()
        worker.submit(make_submit(1, PROMPT, 2))
        worker.launch()
        worker.launch()
        worker.settle()
        worker.abort(1)
        worker.settle()
        told = worker.state(1)
        assert told.ended is not None
        assert told.ended.reason is FinishReason.ABORT
        assert len(told.tokens) == 1
        worker.assert_idle()

    def test_between_launch_and_settle_of_the_last_chunk(self) -> None:
        """Behaviour 3."""
        worker = SimWorker(chunk=8)
        worker.submit(make_submit(1, np.arange(20), 4))
        for _ in range(3):
            plan = worker.launch()
        assert plan is not None
        assert plan.samples.tolist() == [True]
        worker.settle()
        worker.settle()
        worker.abort(1)
        worker.settle()
        worker.assert_idle()
        assert worker.state(1).tokens == []

    def test_unknown_and_ended_requests_are_no_error(self) -> None:
        worker = SimWorker()
        worker.abort(77)
        worker.submit(make_submit(1, PROMPT, 1))
        worker.run()
        worker.abort(1)
        told = worker.state(1)
        assert told.ended is not None
        assert told.ended.reason is FinishReason.LENGTH

    def test_others_are_not_touched(self) -> None:
        """Behaviour 7: one of two equal requests is aborted, and uids that look alike are different requests."""
        worker = SimWorker()
        for uid in (1, 10, 11):
            worker.submit(make_submit(uid, PROMPT, 6))
        worker.step(in_flight=2)
        worker.abort(1)
        worker.run(in_flight=2)
        for uid in (10, 11):
            assert len(worker.state(uid).tokens) == 6
            worker.assert_tokens(uid)

    def test_what_was_computed_is_kept(self) -> None:
        worker = SimWorker(chunk=16)
        worker.submit(make_submit(1, np.arange(40), 3))
        worker.step()
        worker.step()
        worker.abort(1)
        worker.submit(make_submit(2, np.arange(40), 3))
        worker.run()
        assert worker.state(2).cached_tokens == 32


class TestCounters:
    """Behaviour 8: counters of what is in flight end at zero and never go below."""

    def test_all_return_to_zero(self) -> None:
        worker = SimWorker(num_pages=40, chunk=12, max_running=5)
        random = np.random.default_rng(5)
        for uid in range(60):
            worker.submit(make_submit(uid, random.integers(0, 9, random.integers(1, 40)), int(random.integers(1, 9))))
            if uid % 3 == 0:
                worker.abort(uid - 1 if uid else 0)
            worker.step(in_flight=2)  # checks every counter of every request
        worker.run(in_flight=2)
        worker.assert_idle()

    def test_totals_add_up(self) -> None:
        worker = SimWorker()
        worker.submit(make_submit(1, PROMPT, 5))
        worker.submit(make_submit(2, [], 5))
        worker.run()
        worker.submit(make_submit(3, PROMPT, 2))
        worker.submit(make_submit(4, PROMPT, 2))
        worker.abort(4)
        worker.run()
        counters = worker.scheduler.counters.as_dict()
        assert counters["refused_requests"] == 1
        assert counters["admitted_requests"] == counters["finished_requests"] == 2
        assert counters["aborted_requests"] == 1
        assert counters["prompt_tokens"] == 20
        assert counters["cached_tokens"] == 8
        assert counters["generated_tokens"] == 7
        assert counters["computed_tokens"] == (10 + 4) + (2 + 1)


class TestFailure:
    """A failure of the device ends the requests that it concerns, and no others."""

    def test_a_nan_fails_that_request_alone(self) -> None:
        """Behaviour 35."""
        worker = SimWorker()
        for uid in (1, 2, 3):
            worker.submit(make_submit(uid, [uid, *PROMPT], 6))
        worker.launch()
        worker.runner.faults.nan_sequences[2] = {1}
        worker.run(in_flight=2)
        worker.assert_idle()
        failed = worker.state(2).ended
        assert failed is not None
        assert (failed.reason, failed.code) == (None, "INTERNAL")
        assert "NaN" in failed.message
        assert len(worker.state(2).tokens) == 1
        for uid in (1, 3):
            assert len(worker.state(uid).tokens) == 6
            worker.assert_tokens(uid)

    def test_a_failed_step_fails_its_own_requests(self) -> None:
        """Behaviour 62, the scheduler's part: the next step, launched already, goes on with the others."""
        worker = SimWorker(chunk=16, shared_prefix_tokens=1_000)
        worker.submit(make_submit(1, np.arange(16), 6))
        worker.launch()
        worker.submit(make_submit(2, np.arange(14) + 20, 6))
        second = worker.launch()
        assert second is not None
        assert second.num_sequences == 2
        worker.runner.faults.step_errors[1] = "out of memory"
        worker.settle()
        failed = worker.state(1).ended
        assert failed is not None
        assert failed.code == "INTERNAL"
        assert "out of memory" not in failed.message, "a client is told nothing of our internals"
        worker.run(in_flight=2)
        worker.assert_idle()
        assert len(worker.state(2).tokens) == 6
        worker.assert_tokens(2)

    @pytest.mark.parametrize("whole_step", [False, True])
    def test_its_kv_is_not_found_by_others(self, whole_step: bool) -> None:
        """The runner marks what a failed sequence wrote as invalid, so that reading it would raise."""
        worker = SimWorker(chunk=16)
        worker.submit(make_submit(1, np.arange(40), 6))
        worker.step()
        if whole_step:
            worker.runner.faults.step_errors[2] = "injected"
        else:
            worker.runner.faults.nan_sequences[2] = {0}
        worker.run(in_flight=2)
        worker.submit(make_submit(2, np.arange(40), 6))
        worker.run(in_flight=2)
        expected = 16 if whole_step else 0
        assert worker.state(2).cached_tokens == expected, "what an earlier step had computed, unless it may be spoilt"
        worker.assert_tokens(2)

    def test_a_nan_counts_though_the_next_step_fails_as_a_whole(self) -> None:
        worker = SimWorker(chunk=16)
        worker.submit(make_submit(1, np.arange(40), 6))
        for _ in range(2):
            worker.step()
        worker.runner.faults.nan_sequences[3] = {0}
        worker.runner.faults.step_errors[4] = "injected"
        for _ in range(2):
            worker.launch()
        worker.settle_all()
        worker.assert_idle()
        assert worker.scheduler.cache.total_pages == 0

    def test_a_nan_takes_what_others_have_hung_below_its_own_prefix(self) -> None:
        worker = SimWorker(chunk=16, shared_prefix_tokens=1_000)
        worker.submit(make_submit(1, np.arange(40), 6))
        worker.step()
        worker.submit(make_submit(2, [*range(16), *range(100, 180)], 6))
        while 2 not in worker.scheduler.running_uids:
            worker.step()
        worker.step()
        worker.abort(2)
        worker.runner.faults.nan_sequences[len(worker.plans) + 1] = {0}
        worker.run()
        failed = worker.state(1).ended
        assert failed is not None
        assert failed.code == "INTERNAL"
        assert worker.scheduler.cache.total_pages == 0

    def test_a_nan_takes_nothing_that_others_go_on_from(self) -> None:
        worker = SimWorker(chunk=64)
        shared = list(range(16))
        prompts = {1: [*shared, *range(20, 29)], 2: [*shared, *range(30, 39)]}
        worker.submit(make_submit(1, prompts[1], 2))
        worker.run()
        worker.submit(make_submit(2, prompts[2], 6))
        worker.step()
        worker.runner.faults.nan_sequences[len(worker.plans) + 1] = {0}
        worker.run(in_flight=2)
        failed = worker.state(2).ended
        assert failed is not None
        assert failed.code == "INTERNAL"
        for uid, prompt, cached in ((3, prompts[2], 16), (4, prompts[1], 24)):
            worker.submit(make_submit(uid, prompt, 2))
            worker.run()
            assert worker.state(uid).cached_tokens == cached
        worker.assert_idle()

    def test_an_aborted_request_in_a_failed_step_has_one_outcome(self) -> None:
        worker = SimWorker()
        worker.submit(make_submit(1, PROMPT, 6))
        worker.launch()
        worker.launch()
        worker.abort(1)
        worker.runner.faults.step_errors[1] = "injected"
        worker.settle_all()
        worker.assert_idle()
        told = worker.state(1)
        assert told.ended is not None
        assert told.ended.reason is FinishReason.ABORT
        assert worker.scheduler.cache.total_pages == 0

    def test_every_step_may_fail_and_the_next_request_is_served(self) -> None:
        worker = SimWorker()
        for uid in range(5):
            worker.submit(make_submit(uid, PROMPT, 6))
            worker.runner.faults.step_errors[len(worker.plans) + 1] = "injected"
            worker.run(in_flight=2)
            failed = worker.state(uid).ended
            assert failed is not None
            assert failed.code == "INTERNAL"
        worker.submit(make_submit(9, PROMPT, 6))
        worker.run(in_flight=2)
        worker.assert_idle()
        assert len(worker.state(9).tokens) == 6

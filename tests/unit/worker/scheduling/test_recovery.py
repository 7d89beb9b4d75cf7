"""Steps for which the device has no memory: taken back, tried again smaller, and nothing is lost or repeated."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.memory_faults import Rule, at_steps, over, shortage, while_tokens_in
from tests.support.sim_worker import SimWorker, make_submit
from worker.core.step import StepPlan


def worker_with(rule: Rule | None = None, **sizes: int) -> SimWorker:
    worker = SimWorker(**({"num_pages": 400, "page_size": 4, "max_running": 8, "chunk": 32} | sizes))
    if rule is not None:
        worker.runner.faults.out_of_memory = rule
    return worker


def crowd(worker: SimWorker, num_requests: int, *, prompt_tokens: int = 40, max_new_tokens: int = 20) -> None:
    for uid in range(num_requests):
        prompt = (np.arange(prompt_tokens) * 3 + uid * 7) % 49
        worker.submit(make_submit(uid, prompt, max_new_tokens, temperature=float(uid % 2), seed=uid))


def finish(worker: SimWorker, in_flight: int) -> None:
    worker.run(in_flight=in_flight)
    worker.assert_idle()
    for uid in worker.told:
        worker.assert_tokens(uid)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    "rule",
    [over(tokens=20), over(tokens=7), over(sequences=3), over(tokens=1), over(sequences=2, in_sampling=True)],
)
def test_a_device_too_small_for_the_planned_steps_serves_all_the_same(rule: Rule, in_flight: int) -> None:
    """Behaviour 62: every request gets all its tokens, those of an undisturbed run, in steps that fit."""
    worker = worker_with(rule)
    crowd(worker, 8)
    finish(worker, in_flight)
    assert worker.scheduler.counters.finished_requests == 8
    assert worker.scheduler.counters.failed_requests == 0
    assert worker.scheduler.counters.retractions == 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("failing", [{1}, {2}, {3}, {5, 6}, {8, 9, 10, 11}, set(range(2, 40, 3))])
def test_a_passing_shortage_changes_no_token(failing: set[int], in_flight: int) -> None:
    """Behaviours 9, 62: in chunks, decodes and mixed steps, with and without a step in flight behind the failed one."""
    worker = worker_with(at_steps(failing))
    crowd(worker, 5)
    finish(worker, in_flight)
    assert worker.scheduler.counters.finished_requests == 5


def test_the_limits_are_remembered_and_recover() -> None:
    worker = worker_with(over(tokens=16))
    crowd(worker, 1, prompt_tokens=200, max_new_tokens=2)
    worker.step()
    assert worker.scheduler.step_limits == (16, 8)
    for _ in range(4):
        worker.step()
    assert [plan.num_tokens for plan in worker.plans] == [32, 16, 16, 16, 16]
    worker.runner.faults.out_of_memory = lambda plan: None
    for _ in range(4):
        worker.step()
    assert worker.scheduler.step_limits == (32, 8)
    finish(worker, 1)


def test_decodes_that_do_not_fit_together_take_turns() -> None:
    """None starves: over any time each has made about as many tokens as any other."""
    worker = worker_with(over(sequences=2), max_running=6)
    crowd(worker, 6, prompt_tokens=4, max_new_tokens=40)
    for _ in range(60):
        worker.step(in_flight=2)
    made = [len(worker.state(uid).tokens) for uid in range(6)]
    assert min(made) >= 10
    assert max(made) - min(made) <= 6
    finish(worker, 2)


def test_one_request_that_cannot_run_fails_alone_and_says_why() -> None:
    """Behaviour 62: the affected request alone fails; the others have all their tokens."""
    worker = worker_with(while_tokens_in(49, at_least=1))
    crowd(worker, 4)
    worker.submit(make_submit(9, [49, 1, 2, 3], 5))
    crowd_after = make_submit(10, np.arange(30), 5)
    worker.submit(crowd_after)
    finish(worker, 2)
    told = worker.state(9).ended
    assert told is not None
    assert (told.reason, told.code) == (None, "RESOURCE_EXHAUSTED")
    assert "does not run even alone" in told.message
    assert "it asked for 300.00 MiB and 100.00 MiB were free" in told.message
    assert worker.scheduler.counters.finished_requests == 5
    assert worker.scheduler.counters.failed_requests == 1


def test_a_device_without_any_memory_answers_every_request() -> None:
    worker = worker_with(over(tokens=0))
    crowd(worker, 8)
    finish(worker, 2)
    assert worker.scheduler.counters.failed_requests == 8
    assert worker.scheduler.step_limits[0] == 1
    worker.runner.faults.out_of_memory = lambda plan: None
    worker.submit(make_submit(20, np.arange(30), 5))
    finish(worker, 2)
    assert len(worker.state(20).tokens) == 5


def test_a_failed_step_is_tried_again_with_rows_started_anew() -> None:
    """What the runner held of a row may be half of what it should be: it is told everything again."""
    worker = worker_with(at_steps({3}))
    crowd(worker, 2, prompt_tokens=8)
    for _ in range(4):
        worker.step()
    worker.step()
    failed, *again = worker.plans[2:]
    assert failed.relayed.all()
    for index, plan in enumerate(again):  # two sequences were too many: one now, the other next
        assert not plan.relayed.any()
        assert [start.row for start in plan.row_starts] == plan.rows.tolist() == failed.rows[index : index + 1].tolist()
        assert len(plan.row_starts[0].prefix_slots) == plan.starts[0] == 9
        assert plan.input_ids.tolist() == [worker.state(index).tokens[1]]
        assert plan.slots.tolist() == failed.slots[index : index + 1].tolist()
    following = worker.launch()
    assert following is not None
    assert following.relayed.all()


def test_what_was_built_upon_a_failed_step_is_worth_nothing_and_is_waited_for() -> None:
    worker = worker_with(at_steps({3}))
    crowd(worker, 2, prompt_tokens=8)
    for _ in range(2):
        worker.step()
    worker.launch()
    worker.launch()
    worker.settle()
    request = worker.scheduler._lifecycle.requests[0]
    assert (request.in_flight, request.stale_steps) == (1, 1)
    assert worker.launch() is None  # the rows are in a launched step still
    before = len(worker.state(0).tokens)
    worker.settle()
    assert (request.in_flight, request.stale_steps) == (0, 0)
    assert len(worker.state(0).tokens) == before
    assert worker.launch() is not None
    finish(worker, 2)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_abort_amid_a_recovery_releases_everything(in_flight: int) -> None:
    """Behaviours 1, 3: before and after the stale step has settled."""
    worker = worker_with(at_steps({2, 3, 6}))
    crowd(worker, 4)
    for turn in range(8):
        worker.step(in_flight=in_flight)
        if turn in (2, 5):
            worker.abort(turn // 2)
    finish(worker, in_flight)
    assert worker.scheduler.counters.aborted_requests == 2


def test_a_retraction_amid_a_recovery_loses_nothing() -> None:
    """Behaviour 23: pages and device memory run short at once."""
    worker = worker_with(over(sequences=3), num_pages=40, max_running=8)
    for _ in range(200):
        worker.scheduler._admission.growth_share.ended(0.0)
    crowd(worker, 8, prompt_tokens=12, max_new_tokens=60)
    finish(worker, 2)
    assert worker.scheduler.counters.retractions > 0
    assert worker.scheduler.counters.finished_requests == 8


def test_a_step_of_another_error_still_fails_its_requests() -> None:
    worker = worker_with()
    worker.runner.faults.step_errors[2] = "a kernel failed"
    crowd(worker, 2)
    worker.run(in_flight=2)
    assert worker.scheduler.counters.failed_requests > 0
    assert worker.scheduler.step_limits == (32, 8)


def test_a_failed_chunk_is_not_cached() -> None:
    worker = worker_with(at_steps({1}))
    crowd(worker, 1, prompt_tokens=32)
    worker.step()
    assert worker.scheduler.cache.total_pages == 0
    finish(worker, 1)
    assert worker.scheduler.cache.total_pages > 0


def sampling_once(plan: StepPlan):  # type: ignore[no-untyped-def]
    return shortage(in_sampling=True) if plan.step == 2 else None


@pytest.mark.parametrize(
    ("rule", "stage", "words"),
    [
        (over(tokens=20), "prefill", "Lower --chunked-prefill-size"),
        (over(sequences=3), "decode", "Lower --max-running-requests"),
        (sampling_once, "sampling", "Lower --max-running-requests"),
    ],
)
def test_each_stage_is_counted_and_advised_once_an_episode(rule: Rule, stage: str, words: str) -> None:
    """Behaviour 62: the stage is named, the advice points the right way, and one episode is one line."""
    worker = worker_with(rule)
    if stage == "prefill":
        crowd(worker, 1, prompt_tokens=300)
    else:
        crowd(worker, 4, prompt_tokens=1, max_new_tokens=40)
    worker.run(in_flight=2)
    counted = worker.scheduler.counters.as_dict()
    assert {name: counted[f"out_of_memory_{name}"] > 0 for name in ("prefill", "decode", "sampling")} == {
        name: name == stage for name in ("prefill", "decode", "sampling")
    }
    changes = worker.scheduler.shortages.take_changes()
    began = [change for change in changes if change.began]
    assert words in began[0].advice.text
    assert began[0].stage == stage
    # An episode that ended may be followed by another, when the size that was tried again was too large still.
    assert [change.began for change in changes] == [True, False] * (len(changes) // 2) + [True] * (len(changes) % 2)
    assert len(began) <= counted[f"out_of_memory_{stage}"]
    assert (stage in worker.scheduler.shortages.open) == (len(changes) % 2 == 1)


def test_an_episode_ends_when_the_size_is_full_again() -> None:
    worker = worker_with(at_steps({2}))
    crowd(worker, 4, prompt_tokens=4, max_new_tokens=60)
    worker.run(in_flight=2)
    assert worker.scheduler.shortages.open == {}
    assert [change.began for change in worker.scheduler.shortages.take_changes()] == [True, False]
    assert worker.scheduler.step_limits == (32, 8)


def test_a_full_pool_is_an_episode_of_its_own() -> None:
    """Behaviour 62: a full KV pool asks for fewer requests, and is no failure of the device."""
    worker = worker_with(num_pages=40)
    for _ in range(200):
        worker.scheduler._admission.growth_share.ended(0.0)
    crowd(worker, 8, prompt_tokens=12, max_new_tokens=60)
    while not worker.scheduler.counters.retractions:
        worker.step(in_flight=2)
    advice = worker.scheduler.shortages.open["kv_full"]
    assert "The KV pool of 160 tokens is full" in advice
    assert "--max-running-requests" in advice
    finish(worker, 2)
    assert worker.scheduler.shortages.open == {}
    assert worker.scheduler.step_limits == (32, 8)


def test_leaping_is_not_done_while_steps_are_small() -> None:
    worker = worker_with(over(sequences=2), chunk=64)
    crowd(worker, 4, prompt_tokens=4)
    for _ in range(4):
        worker.step()
    worker.settle_all()
    assert worker.scheduler.steps_ahead() == 0


@pytest.mark.parametrize(
    ("rule", "stage", "advised", "misled"),
    [
        (over(tokens=24), "prefill", {"chunk": 16}, {"max_running": 2}),
        (over(sequences=3), "decode", {"max_running": 3}, {"chunk": 16}),
        (over(sequences=3, in_sampling=True), "sampling", {"max_running": 3}, {"chunk": 16}),
    ],
)
def test_the_advised_setting_ends_the_shortage_and_the_other_one_does_not(
    rule: Rule, stage: str, advised: dict[str, int], misled: dict[str, int]
) -> None:
    """Behaviour 62: the advice of each stage of a step, in both directions."""

    def shortages(**sizes: int) -> float:
        worker = worker_with(rule, **sizes)
        crowd(worker, 8, prompt_tokens=60 if stage == "prefill" else 1, max_new_tokens=12)
        finish(worker, 2)
        return worker.scheduler.counters.as_dict()[f"out_of_memory_{stage}"]

    assert shortages() > 0
    assert shortages(**advised) == 0
    assert shortages(**misled) > 0


def test_fewer_requests_or_more_pages_end_a_full_pool_and_smaller_chunks_do_not() -> None:
    """Behaviour 62: the advice for a full KV pool, in both directions."""

    def retractions(**sizes: int) -> int:
        worker = worker_with(**({"num_pages": 40} | sizes))
        for _ in range(200):
            worker.scheduler._admission.growth_share.ended(0.0)
        crowd(worker, 8, prompt_tokens=12, max_new_tokens=60)
        finish(worker, 2)
        return worker.scheduler.counters.retractions

    assert retractions() > 0
    assert retractions(max_running=2) == 0
    assert retractions(num_pages=160) == 0
    assert retractions(chunk=8) > 0

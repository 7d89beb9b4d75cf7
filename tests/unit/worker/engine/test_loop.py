"""The loop's four acts, its reports, and its end, with the real scheduler and a runner that obeys the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from radixfleet.clock import ManualClock
from radixfleet.types import FinishReason
from tests.support.engine_fakes import ListeningFront, ObedientExecutor, ready, submit
from tests.support.grammars import regex
from tests.support.memory_faults import shortage
from worker.core.messages import Abort, Flush, Flushed, FollowBlocks, Prepare, Prepared, Report, StepOutputs, Stop
from worker.engine.loop import CHECK_EVERY_S, REPORT_ALIVE_S, REPORT_CHANGED_S, EngineLoop
from worker.engine.pacing import Pacing
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler


class Engine:
    """A loop with all that it needs; `idle()` turns it until it has nothing to do."""

    def __init__(self, *, overlap: bool) -> None:
        self.clock = ManualClock(100.0)
        self.front = ListeningFront()
        self.executor = ObedientExecutor(self.clock)
        self.scheduler = Scheduler(Limits.from_ready(ready()), self.clock)
        self.loop = EngineLoop(self.scheduler, self.executor, self.front, self.clock, overlap=overlap)

    def idle(self) -> int:
        """How many turns had something to do."""
        turns = 0
        while self.loop.turn():
            self.scheduler.check()
            turns += 1
        return turns

    def run_out(self) -> None:
        """Until all requests have ended."""
        self.idle()
        while self.executor.launched:
            self.executor.end_step()
            self.idle()
        assert not self.scheduler.has_work

    def report(self) -> Report:
        """The next one."""
        self.front.take(Report)
        self.clock.advance(REPORT_ALIVE_S)
        self.idle()
        return self.front.take(Report)[-1]


@pytest.fixture
def overlapped() -> Engine:
    return Engine(overlap=True)


@pytest.fixture
def serial() -> Engine:
    return Engine(overlap=False)


def tokens_of(front: ListeningFront, uid: int) -> list[int]:
    return [o.token_id for message in front.take(StepOutputs) for o in message.outputs if o.uid == uid]


def test_overlapped_the_second_step_is_launched_before_the_first_has_ended(overlapped: Engine) -> None:
    overlapped.front.inbox.append(submit(1))
    overlapped.idle()
    assert [plan.step for plan in overlapped.executor.launched] == [1, 2]
    assert overlapped.executor.launched[1].relayed.tolist() == [True]


def test_overlapped_no_more_than_two_steps_are_in_flight(overlapped: Engine) -> None:
    overlapped.front.inbox.append(submit(1, max_new_tokens=8))
    overlapped.idle()
    for _ in range(4):
        overlapped.executor.end_step()
        overlapped.idle()
        assert len(overlapped.executor.launched) == 2


def test_serial_one_step_is_in_flight(serial: Engine) -> None:
    serial.front.inbox.append(submit(1))
    serial.idle()
    assert len(serial.executor.launched) == 1
    serial.executor.end_step()
    serial.idle()
    assert len(serial.executor.launched) == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_runs_from_its_admission_to_its_end(overlap: bool) -> None:
    engine = Engine(overlap=overlap)
    engine.front.inbox.append(submit(7, max_new_tokens=3))
    engine.run_out()
    heard = engine.front.take(StepOutputs)
    assert [admitted.uid for message in heard for admitted in message.admitted] == [7]
    assert [output.token_id for message in heard for output in message.outputs] == [1, 2, 3]
    assert [(ended.uid, ended.reason) for message in heard for ended in message.ended] == [(7, FinishReason.LENGTH)]


def test_a_request_that_ends_by_length_wastes_no_step(overlapped: Engine) -> None:
    overlapped.front.inbox.append(submit(1, max_new_tokens=5))
    overlapped.run_out()
    report = overlapped.report()
    assert report.counters["steps"] == 5
    assert report.counters["discarded_tokens"] == 0


def test_what_one_turn_brings_for_all_requests_is_one_message(serial: Engine) -> None:
    serial.front.inbox += [submit(1), submit(2), submit(3)]
    serial.idle()
    serial.front.take(StepOutputs)
    serial.executor.end_step()
    serial.idle()
    (message,) = serial.front.take(StepOutputs)
    assert [output.uid for output in message.outputs] == [1, 2, 3]


def test_an_abort_between_launch_and_settle_gives_one_end_and_no_token(overlapped: Engine) -> None:
    """Behaviours 3 and 4: nothing leaks, and no output follows the end, although two steps were in flight."""
    overlapped.front.inbox.append(submit(1))
    overlapped.idle()
    overlapped.front.inbox.append(Abort(1))
    overlapped.run_out()
    heard = overlapped.front.take(StepOutputs)
    assert [ended.reason for message in heard for ended in message.ended] == [FinishReason.ABORT]
    assert not any(message.outputs for message in heard)
    assert overlapped.report().load.kv_protected_tokens == 0


def test_in_flight_counts_end_at_zero(overlapped: Engine) -> None:
    """Behaviour 8: with chunks, aborts and many requests, nothing is counted below zero or left over."""
    for uid in range(1, 25):
        overlapped.front.inbox.append(submit(uid, 40 + uid % 7, max_new_tokens=uid % 5 + 1))
        if uid % 3 == 0:
            overlapped.front.inbox.append(Abort(uid - 1))
        overlapped.idle()
        assert len(overlapped.executor.launched) <= 2
        overlapped.scheduler.check()
        overlapped.executor.end_step()
    overlapped.run_out()
    report = overlapped.report()
    assert report.load.running_requests == report.load.waiting_requests == 0
    assert report.load.outstanding_prompt_tokens == report.load.kv_protected_tokens == 0
    assert report.step_age_s == 0


def test_flush_is_answered_with_its_ticket(serial: Engine) -> None:
    serial.front.inbox.append(submit(1, 8, max_new_tokens=1))
    serial.run_out()
    serial.front.inbox.append(Flush(ticket=42))
    serial.idle()
    assert serial.front.take(Flushed) == [Flushed(ticket=42, flushed_tokens=8, kept_tokens=0)]


def test_tells_the_tokens_of_blocks_to_whoever_follows_them_and_to_nobody_else(serial: Engine) -> None:
    serial.front.inbox.append(submit(1, 65, max_new_tokens=1))
    serial.run_out()
    assert serial.report().block_runs is None
    serial.front.inbox.append(FollowBlocks(on=True))
    first = serial.report()
    assert first.has_all_blocks
    (run,) = first.block_runs or []
    assert (run.namespace, run.first, run.token_ids.tolist()) == (("model",), 0, list(range(1000, 1064)))
    assert run.hashes.tolist() == serial.scheduler.cache.block_hashes().tolist()
    serial.front.inbox.append(submit(2, 65, max_new_tokens=1))
    serial.run_out()
    serial.clock.advance(REPORT_ALIVE_S)
    serial.idle()
    reports = serial.front.take(Report)
    assert not any(report.has_all_blocks for report in reports)
    later = [run for report in reports for run in report.block_runs or []]
    assert [run.token_ids.tolist() for run in later] == [list(range(2000, 2064))]
    serial.front.inbox.append(FollowBlocks(on=False))
    assert serial.report().block_runs is None


def test_an_idle_engine_reports_to_be_seen_alive_and_no_more(serial: Engine) -> None:
    serial.report()
    assert serial.loop.wait_s == REPORT_ALIVE_S
    serial.clock.advance(REPORT_ALIVE_S * 0.9)
    serial.idle()
    assert serial.front.take(Report) == []
    serial.clock.advance(REPORT_ALIVE_S * 0.1)
    serial.idle()
    assert len(serial.front.take(Report)) == 1


def test_a_change_is_reported_soon(serial: Engine) -> None:
    serial.report()
    serial.front.inbox.append(submit(1))
    serial.idle()
    assert serial.loop.wait_s == pytest.approx(REPORT_CHANGED_S)
    serial.clock.advance(REPORT_CHANGED_S)
    serial.idle()
    (report,) = serial.front.take(Report)
    assert report.load.running_requests == 1


def test_a_report_names_the_blocks_that_came_and_went_once(serial: Engine) -> None:
    serial.front.inbox.append(submit(1, 65, max_new_tokens=1))
    serial.run_out()
    assert sum(len(report.added_blocks) for report in [*serial.front.take(Report), serial.report()]) == 1
    serial.front.inbox.append(Flush(ticket=1))
    serial.idle()
    flushed = serial.report()
    assert (len(flushed.evicted_blocks), len(flushed.added_blocks)) == (1, 0)
    assert len(serial.report().evicted_blocks) == 0


def test_a_step_without_a_result_ages(serial: Engine) -> None:
    """Behaviour 60: what the front needs to see a runner that does not answer."""
    serial.front.inbox.append(submit(1))
    serial.idle()
    assert serial.report().step_age_s == pytest.approx(REPORT_ALIVE_S)
    assert serial.report().step_age_s == pytest.approx(2 * REPORT_ALIVE_S)


def test_a_step_that_waits_for_the_one_before_does_not_age(overlapped: Engine) -> None:
    overlapped.front.inbox.append(submit(1))
    overlapped.idle()
    overlapped.clock.advance(50.0)
    overlapped.executor.end_step()
    assert overlapped.report().step_age_s <= REPORT_ALIVE_S


def test_bubbles_are_reported_with_the_steps_they_precede(serial: Engine) -> None:
    serial.front.inbox.append(submit(1, max_new_tokens=2))
    serial.idle()
    serial.executor.end_step()
    serial.clock.advance(0.25)
    serial.idle()
    serial.executor.end_step()
    serial.front.take(Report)
    report = serial.report()
    assert report.counters["bubble_s"] == pytest.approx(0.25)
    assert report.counters["step_s"] == pytest.approx(2.0)


def test_a_step_that_fails_as_a_whole_fails_its_requests_and_the_engine_goes_on(serial: Engine) -> None:
    serial.front.inbox.append(submit(1))
    serial.idle()
    serial.executor.end_step(error="CUDA error: out of memory")
    serial.idle()
    (ended,) = serial.front.take(StepOutputs)[-1].ended
    assert (ended.reason, ended.code) == (None, "INTERNAL")
    serial.front.inbox.append(submit(2, max_new_tokens=2))
    serial.run_out()
    assert len(tokens_of(serial.front, 2)) == 2
    assert serial.report().counters["failed_steps"] == 1


def test_a_shortage_of_memory_is_logged_once_and_reported_while_it_lasts(serial: Engine) -> None:
    """Behaviour 62: what to change stands in one line of the log and in every report; no request is lost."""
    serial.front.inbox.append(submit(1, prompt=32, max_new_tokens=3))
    with capture_logs() as logs:
        for _ in range(3):
            serial.idle()
            serial.executor.end_step(error="out of memory", out_of_memory=shortage())
        serial.idle()
        report = serial.report()
    told = [entry for entry in logs if entry["log_level"] in ("warning", "error")]
    assert [entry["event"] for entry in told] == ["memory ran short"]
    assert told[0]["stage"] == "prefill"
    assert "--chunked-prefill-size" in told[0]["advice"]
    assert report.step_limits == (4, 4)
    assert report.advice == {"prefill": told[0]["advice"]}
    assert report.counters["out_of_memory_prefill"] == report.counters["failed_steps"] == 3
    with capture_logs() as logs:
        for uid in range(2, 30):
            serial.front.inbox.append(submit(uid, prompt=32, max_new_tokens=2))
            serial.run_out()
        report = serial.report()
    assert [entry["event"] for entry in logs] == ["memory is enough again"]
    assert report.step_limits == (32, 4)
    assert report.advice == {}
    assert len(tokens_of(serial.front, 1)) == 3


def test_stop_settles_what_is_in_flight_and_plans_no_more(overlapped: Engine) -> None:
    overlapped.front.inbox.append(submit(1, max_new_tokens=50))
    overlapped.idle()
    overlapped.front.inbox.append(Stop())
    overlapped.idle()
    assert not overlapped.loop.finished
    overlapped.executor.end_step()
    overlapped.idle()
    assert not overlapped.loop.finished
    overlapped.executor.end_step()
    overlapped.idle()
    assert overlapped.loop.finished
    assert tokens_of(overlapped.front, 1) == [1, 2]


def test_an_idle_engine_that_is_told_to_stop_waits_for_nothing_more(overlapped: Engine) -> None:
    overlapped.idle()
    assert overlapped.loop.wait_s > 0
    overlapped.front.inbox.append(Stop())
    overlapped.loop.turn()
    assert overlapped.loop.finished
    assert overlapped.loop.wait_s == 0


def test_an_idle_engine_verifies_its_books_now_and_then(serial: Engine) -> None:
    """Behaviour 10: conservation is checked when idle in production."""
    serial.front.inbox.append(submit(1))
    serial.run_out()
    assert serial.scheduler.holdings.allocator.allocate(1) is not None, "a page that nobody will account for"
    serial.clock.advance(CHECK_EVERY_S * 0.9)
    serial.loop.turn()
    serial.clock.advance(CHECK_EVERY_S * 0.1)
    with pytest.raises(AssertionError):
        serial.loop.turn()


def test_a_check_goes_on_turn_by_turn_and_gives_way_to_work(serial: Engine) -> None:
    """However large the pool: what comes between two portions is seen at once, and the check begins again later."""
    serial.front.inbox.append(submit(1, prompt=64, max_new_tokens=2))
    serial.run_out()
    begun: list[int] = []

    def portions() -> Iterator[None]:
        begun.append(0)
        for _ in range(3):
            begun[-1] += 1
            yield

    serial.scheduler.checks = portions  # type: ignore[method-assign]
    serial.clock.advance(CHECK_EVERY_S)
    serial.loop.turn()
    assert begun == [1]
    assert serial.loop.wait_s == 0.0
    serial.front.inbox.append(submit(2, max_new_tokens=1))
    assert serial.loop.turn()
    assert serial.loop.wait_s > 0.0
    serial.executor.end_step()
    assert serial.loop.turn()
    assert not serial.scheduler.has_work
    serial.loop.turn()
    assert begun == [1]
    serial.clock.advance(CHECK_EVERY_S / 2)
    serial.loop.turn()
    assert begun == [1]
    serial.clock.advance(CHECK_EVERY_S)
    for _ in range(6):
        serial.loop.turn()
    assert begun == [1, 3]
    serial.clock.advance(2 * CHECK_EVERY_S)
    serial.loop.turn()
    assert begun == [1, 3]  # nothing has happened since


def test_a_busy_engine_is_not_held_up_by_verifying(serial: Engine) -> None:
    serial.front.inbox.append(submit(1))
    serial.idle()
    assert serial.scheduler.holdings.allocator.allocate(1) is not None
    serial.clock.advance(2 * CHECK_EVERY_S)
    serial.loop.turn()
    assert len(serial.front.take(Report)) == 1


def test_grammars_are_passed_on_to_the_runner_and_its_answers_to_the_front(overlapped: Engine) -> None:
    overlapped.front.inbox = [Prepare(4, regex("a+")), Prepare(5, regex("bad"))]
    overlapped.idle()
    assert overlapped.front.take(Prepared) == [Prepared(4, ""), Prepared(5, "it is bad")]


class PacedEngine(Engine):
    """One that waits with planning; steps take a second."""

    def __init__(self) -> None:
        super().__init__(overlap=True)
        self.pacing = Pacing()
        self.loop = EngineLoop(self.scheduler, self.executor, self.front, self.clock, overlap=True, pacing=self.pacing)

    def begin(self) -> None:
        """A request decodes, and what its steps take is known."""
        self.front.inbox.append(submit(1, prompt=1, max_new_tokens=20))
        self.idle()
        self.executor.end_step()
        self.idle()
        while len(self.executor.launched) == 2:
            self.executor.end_step()
            self.idle()


@pytest.fixture
def paced() -> PacedEngine:
    engine = PacedEngine()
    engine.begin()
    return engine


def test_paced_the_next_step_is_planned_when_it_is_due(paced: PacedEngine) -> None:
    (running,) = paced.executor.launched
    paced.clock.advance(1.0 - paced.pacing.margin_s - 1e-6)
    assert paced.idle() == 0
    assert 0 < paced.loop.wait_s < 1e-5
    paced.clock.advance(1e-5)
    paced.idle()
    assert [plan.step for plan in paced.executor.launched] == [running.step, running.step + 1]


def test_paced_who_comes_while_a_step_runs_is_in_the_next(paced: PacedEngine) -> None:
    paced.clock.advance(0.5)
    paced.front.inbox.append(submit(2))
    paced.idle()
    assert len(paced.executor.launched) == 1
    paced.clock.advance(0.5)
    paced.idle()
    assert paced.executor.launched[1].num_sequences == 2


def test_paced_a_step_that_ends_early_is_followed_at_once(paced: PacedEngine) -> None:
    (running,) = paced.executor.launched
    paced.executor.end_step()
    paced.idle()
    assert [plan.step for plan in paced.executor.launched] == [running.step + 1]


def test_paced_all_tokens_come(paced: PacedEngine) -> None:
    paced.front.inbox.append(submit(2, max_new_tokens=5))
    paced.run_out()
    assert len(tokens_of(paced.front, 2)) == 5


def test_paced_an_engine_that_waits_for_its_last_step_does_not_turn_in_vain(paced: PacedEngine) -> None:
    """When a step is due and there is nothing to plan, the next turn may wait until a report is."""
    paced.clock.advance(1.0)
    paced.idle()
    while len(paced.executor.launched) == 2:
        paced.executor.end_step()
        paced.clock.advance(1.0)
        paced.idle()
    assert paced.scheduler.has_work
    assert paced.loop.wait_s > 0


def test_a_step_is_planned_when_the_runner_says_that_the_layers_of_the_one_in_flight_are_computed(
    paced: PacedEngine,
) -> None:
    """Where the runner says so, expectations count no more: a step that takes longer than ever is waited for."""
    paced.executor.layers_computed = True
    paced.idle()
    (_, running) = paced.executor.launched
    paced.executor.end_step()
    paced.clock.advance(100.0)
    paced.idle()
    assert [plan.step for plan in paced.executor.launched] == [running.step]
    paced.executor.layers_computed = True
    paced.idle()
    assert [plan.step for plan in paced.executor.launched] == [running.step, running.step + 1]


def test_a_step_that_ends_without_a_word_is_followed_at_once(paced: PacedEngine) -> None:
    """Such as one that fails in its layers."""
    paced.executor.layers_computed = True
    paced.idle()
    for _ in range(2):
        paced.executor.end_step()
        paced.idle()
    assert len(paced.executor.launched) == 1


def test_nobody_turns_in_vain_between_a_runners_word_and_the_end_of_its_step(paced: PacedEngine) -> None:
    paced.executor.layers_computed = True
    paced.idle()
    while paced.executor.launched:
        last = paced.executor.launched[-1]
        paced.executor.end_step()
        paced.executor.layers_computed = bool(paced.executor.launched)
        paced.idle()
        assert paced.loop.wait_s > 0, f"step {last.step} is not waited for"


def test_a_runners_word_changes_nothing_for_a_serial_engine(serial: Engine) -> None:
    serial.front.inbox.append(submit(1))
    serial.idle()
    serial.executor.layers_computed = True
    serial.idle()
    assert len(serial.executor.launched) == 1
    assert serial.loop.wait_s > 0

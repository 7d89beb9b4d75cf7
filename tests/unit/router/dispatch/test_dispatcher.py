"""The dispatcher over scripted links: which replies reach the client, what is tried again, what the books say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixfleet.convert import unpack_tokens
from radixfleet.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, RadixfleetError, Unavailable
from radixfleet.v1 import inference_pb2
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.gate import Gate
from router.dispatch.lease import Decision
from router.dispatch.link import LinkFailure, Reply
from router.dispatch.record import RequestLog, RequestRecord
from router.dispatch.request import PreparedRequest
from router.dispatch.retry import HEADWAY_TOKENS
from router.workers.breaker import BreakerState
from router.workers.state import WorkerState
from tests.support.router_parts import Parts, prepared
from tests.support.waiting import until

ANSWER = inference_pb2.GenerateResponse()
STARTED = Reply("started", ANSWER, cached_tokens=64)
FINISHED = Reply("end", ANSWER)


def delta(*ids: int, index: int = 0) -> Reply:
    return Reply("part", ANSWER, token_ids=ids, index=index)


def lost() -> LinkFailure:
    return LinkFailure("transport", Unavailable("worker cannot be reached", retry_after_s=1.0), "connection reset")


def faulty() -> LinkFailure:
    return LinkFailure("fault", Unavailable("worker failed: boom", retry_after_s=1.0), "boom")


def says(error: RadixfleetError) -> LinkFailure:
    return LinkFailure("answer", error, "said the worker")


WHOLE = (STARTED, delta(1), delta(2, 3), FINISHED)
Step = Reply | LinkFailure | asyncio.Event | float


@dataclass
class ScriptedLink:
    """Plays one list of steps for each request: a reply, a failure, an event to wait for, seconds that pass."""

    parts: Parts
    scripts: list[Sequence[Step]]
    timeouts_s: list[float | None] = field(default_factory=list)
    requests: list[PreparedRequest] = field(default_factory=list)
    closed: int = 0

    async def generate(self, request: PreparedRequest, timeout_s: float | None) -> AsyncGenerator[Reply, None]:
        self.timeouts_s.append(timeout_s)
        self.requests.append(request)
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, LinkFailure):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, float):
                    self.parts.clock.advance(step)
                else:
                    yield step
        finally:
            self.closed += 1


class Carrying:
    """A dispatcher, its links by worker, and what the client got."""

    def __init__(self, *scripts: Sequence[Step], workers: int = 3, max_retries: int = 1, ratio: float = 0.1) -> None:
        self.parts = Parts(workers)
        self.link = ScriptedLink(self.parts, list(scripts))
        self.tried: list[WorkerState] = []
        self.log = RequestLog(self.parts.metrics, self.parts.clock)
        self.got: list[Reply] = []
        self.retries: list[int] = []
        self.record: RequestRecord | None = None
        self.send_gate: asyncio.Event | None = None
        self.resumable = False
        self.dispatcher = Dispatcher(
            Gate(self.parts.chooser, max_waiting=0, metrics=self.parts.metrics, clock=self.parts.clock),
            self._link_to,
            max_retries=max_retries,
            retry_ratio=ratio,
            log=self.log,
            metrics=self.parts.metrics,
            clock=self.parts.clock,
        )

    def _link_to(self, worker: WorkerState) -> ScriptedLink:
        self.tried.append(worker)
        return self.link

    async def _send(self, reply: Reply, decision: Decision, retries: int) -> None:
        if self.send_gate is not None:
            await self.send_gate.wait()
        self.got.append(reply)
        self.retries.append(retries)

    async def run(self, timeout_s: float | None = None) -> None:
        with self.log.follow("r", lambda: timeout_s) as self.record:
            await self.dispatcher.run(
                prepared(300, resumable=self.resumable), self.record, self._send, lambda: timeout_s
            )

    def outcome(self, name: str) -> float | None:
        labels = {"outcome": name}
        return self.parts.metrics.registry.get_sample_value("radixfleet_router_requests_total", labels)

    def is_started(self) -> bool:
        """The worker said how much of the prompt's 300 tokens it found."""
        return any(worker.books.own_tokens == 300 - STARTED.cached_tokens for worker in self.parts.workers)

    def check_settled(self) -> None:
        self.parts.check_settled()
        assert self.log.in_flight == 0
        assert self.link.closed == len(self.tried)


async def test_replies_are_passed_on_as_they_are() -> None:
    carrying = Carrying(WHOLE)
    await carrying.run()
    assert carrying.got == list(WHOLE)
    assert carrying.outcome("ok") == 1
    record = carrying.record
    assert record is not None
    assert (record.worker, record.reason, record.cached_tokens, record.output_tokens) == (
        carrying.tried[0].name,
        "load",
        64,
        3,
    )
    carrying.check_settled()


async def test_started_waits_for_the_first_token() -> None:
    gate = asyncio.Event()
    carrying = Carrying([STARTED, gate, delta(1), FINISHED])
    task = asyncio.create_task(carrying.run())
    await until(carrying.is_started)
    assert carrying.got == []
    gate.set()
    await task
    assert carrying.got == [STARTED, delta(1), FINISHED]


async def test_a_completion_without_tokens_is_whole_too() -> None:
    carrying = Carrying([STARTED, FINISHED])
    await carrying.run()
    assert carrying.got == [STARTED, FINISHED]


async def test_several_completions_are_passed_on_mixed_and_all_their_tokens_count() -> None:
    script = (STARTED, delta(1), delta(7, index=1), Reply("part", ANSWER), delta(8, index=1), FINISHED)
    carrying = Carrying(script)
    await carrying.run()
    assert carrying.got == list(script)
    assert carrying.record is not None
    assert carrying.record.output_tokens == 3


@pytest.mark.parametrize(
    "failed", [[lost()], [STARTED, lost()], [says(Unavailable("draining"))], [says(Overloaded("queue full"))]]
)
async def test_a_request_that_failed_before_its_first_token_is_tried_on_another_worker(failed: list[Step]) -> None:
    """Behaviour 53: before the first token only; the client sees one Started, that of the worker that answered."""
    carrying = Carrying(failed, WHOLE)
    await carrying.run()
    assert carrying.got == list(WHOLE)
    assert carrying.retries[0] == 1
    assert len(carrying.tried) == 2
    assert carrying.tried[0] is not carrying.tried[1]
    carrying.check_settled()


@pytest.mark.parametrize(
    ("failure", "words", "retry_after_s"),
    [
        (lost(), "was lost after 3 tokens", 1.0),
        (says(Unavailable("the engine died", retry_after_s=3.0)), "stopped after 3 tokens.*the engine died", 3.0),
        (says(Unavailable("it drains")), "stopped after 3 tokens.*it drains", 1.0),
    ],
)
async def test_a_worker_lost_after_the_first_token_is_an_error_that_says_how_much_was_delivered(
    failure: LinkFailure, words: str, retry_after_s: float
) -> None:
    """Behaviour 53: never a silent stop, never a second try. A worker that tells why it stops was not lost."""
    carrying = Carrying([STARTED, delta(1), delta(2, 3), failure], WHOLE)
    with pytest.raises(Unavailable, match=words) as caught:
        await carrying.run()
    assert caught.value.retry_after_s == retry_after_s
    assert caught.value.metadata["delivered_tokens"] == "3"
    assert len(carrying.tried) == 1
    assert carrying.outcome("unavailable") == 1
    carrying.check_settled()


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("temperature", field="sampling.temperature"), InternalError("broken"), DeadlineExceeded("")],
)
async def test_what_another_worker_would_not_do_better_is_not_tried_again(error: RadixfleetError) -> None:
    carrying = Carrying([says(error)], WHOLE)
    with pytest.raises(type(error)) as caught:
        await carrying.run()
    assert caught.value is error
    assert len(carrying.tried) == 1
    carrying.check_settled()


async def test_no_more_retries_than_allowed() -> None:
    carrying = Carrying([lost()], [lost()], WHOLE, max_retries=1)
    with pytest.raises(Unavailable):
        await carrying.run()
    assert len(carrying.tried) == 2
    carrying.check_settled()


async def test_the_last_worker_is_not_tried_twice() -> None:
    carrying = Carrying([says(Overloaded("queue full", retry_after_s=3.0))], WHOLE, workers=1)
    with pytest.raises(Overloaded) as caught:
        await carrying.run()
    assert caught.value.retry_after_s == 3.0
    carrying.check_settled()


async def test_the_budget_bounds_the_retries_of_a_fleet_that_fails() -> None:
    """Behaviour 53: 100 requests that all fail are not 200."""
    carrying = Carrying(*([lost()] for _ in range(200)), workers=30, ratio=0.1)
    for _ in range(60):
        with pytest.raises(Unavailable):
            await carrying.run()
    assert len(carrying.tried) <= 60 + 10 + 6
    results = {
        result: carrying.parts.metrics.registry.get_sample_value("radixfleet_router_retries_total", {"result": result})
        for result in ("retried", "refused")
    }
    assert results["retried"] == len(carrying.tried) - 60
    assert results["refused"] == 120 - len(carrying.tried)
    carrying.check_settled()


async def test_what_cannot_be_tried_elsewhere_spends_nothing_and_is_not_told_that_it_did() -> None:
    carrying = Carrying(*([lost()] for _ in range(30)), workers=1, ratio=0.1)
    for _ in range(30):
        with pytest.raises(Unavailable) as caught:
            await carrying.run()
        carrying.parts.clock.advance(1000.0)  # its breaker lets one through again
        assert "budget" not in str(caught.value)
    assert len(carrying.tried) == 30
    carrying.check_settled()


async def test_the_time_that_is_left_goes_to_the_worker() -> None:
    carrying = Carrying(WHOLE)
    await carrying.run(timeout_s=3.5)
    assert carrying.link.timeouts_s == [3.5]


@pytest.mark.parametrize(
    "failure",
    [
        says(InvalidRequest("no")),
        says(InternalError("NaN")),
        says(Overloaded("full")),
        LinkFailure("deadline", DeadlineExceeded("late"), "client's deadline"),
    ],
)
async def test_what_the_client_or_the_engine_did_does_not_open_the_breaker(failure: LinkFailure) -> None:
    """Behaviour 52: client errors and short deadlines say nothing about the connection to a worker."""
    carrying = Carrying(*([0.1, failure] for _ in range(20)), workers=1)
    for _ in range(20):
        with pytest.raises(RadixfleetError):
            await carrying.run()
    assert carrying.parts.workers[0].breaker.state is BreakerState.CLOSED


async def test_a_request_that_no_worker_answers_rightly_shuts_none_out() -> None:
    """Of all that it was tried on, however long they took."""
    carrying = Carrying(*([2.0, faulty()] for _ in range(40)), workers=2, ratio=1.0)
    for _ in range(20):
        with pytest.raises(Unavailable, match="boom"):
            await carrying.run()
    assert {worker.breaker.state for worker in carrying.parts.workers} == {BreakerState.CLOSED}


@pytest.mark.parametrize(
    "failure", [lost(), LinkFailure("deadline", DeadlineExceeded("late"), "silent for two seconds")]
)
async def test_lost_connections_and_silence_open_the_breaker(failure: LinkFailure) -> None:
    carrying = Carrying(*([2.0, failure] for _ in range(3)), workers=1)
    for _ in range(3):
        with pytest.raises(RadixfleetError):
            await carrying.run()
    assert carrying.parts.workers[0].breaker.state is BreakerState.OPEN


async def test_a_client_that_leaves_before_the_first_token_ends_the_request_at_the_worker() -> None:
    """Behaviour 58: and it is counted as cancelled, neither as a success nor as a failure."""
    carrying = Carrying([STARTED, asyncio.Event()])
    task = asyncio.create_task(carrying.run())
    await until(carrying.is_started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert carrying.link.closed == 1
    assert carrying.outcome("cancelled") == 1
    assert carrying.outcome("ok") == carrying.outcome("unavailable") == carrying.outcome("internal") == 0
    carrying.check_settled()


async def test_a_client_that_leaves_while_it_is_written_to_ends_the_request_at_the_worker() -> None:
    carrying = Carrying(WHOLE)
    carrying.send_gate = asyncio.Event()
    task = asyncio.create_task(carrying.run())
    await until(lambda: carrying.record is not None and carrying.record.output_tokens)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    carrying.check_settled()
    assert carrying.outcome("cancelled") == 1


async def test_a_request_cut_by_its_deadline_is_not_counted_as_cancelled() -> None:
    carrying = Carrying([STARTED, asyncio.Event()])
    task = asyncio.create_task(carrying.run(timeout_s=0.0))
    await until(carrying.is_started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert carrying.outcome("deadline_exceeded") == 1


async def resume(carrying: Carrying) -> None:
    carrying.resumable = True
    await carrying.run()


@pytest.mark.parametrize("failure", [lost(), says(Unavailable("the engine restarted"))])
async def test_a_resumable_answer_goes_on_elsewhere_from_the_tokens_that_were_sent(failure: LinkFailure) -> None:
    carrying = Carrying([STARTED, delta(1), delta(2, 3), failure], [STARTED, delta(4), FINISHED])
    await resume(carrying)
    assert carrying.got == [STARTED, delta(1), delta(2, 3), delta(4), FINISHED]
    first, second = carrying.link.requests
    assert first.message.generated.packed == b""
    assert unpack_tokens(second.message.generated).tolist() == [1, 2, 3]
    assert second.prompt_tokens == 303
    assert second.tokens[300:].tolist() == [1, 2, 3]
    assert len(carrying.tried) == 2
    assert carrying.tried[0] is not carrying.tried[1]
    assert carrying.record is not None
    assert (carrying.record.output_tokens, carrying.record.prompt_tokens, carrying.record.retries) == (4, 300, 1)
    assert carrying.outcome("ok") == 1
    carrying.check_settled()


async def test_an_answer_is_resumed_as_often_as_it_makes_headway_and_never_says_started_twice() -> None:
    """A worker that failed before may be good again later; failures without a token go on to others."""
    far = delta(*range(HEADWAY_TOKENS))
    scripts = [[STARTED, delta(1), lost()], [STARTED, lost()], [STARTED, far, lost()], [lost()], WHOLE]
    carrying = Carrying(*scripts, workers=3)
    await resume(carrying)
    assert carrying.got == [STARTED, delta(1), far, *WHOLE[1:]]
    assert [len(request.message.generated.packed) // 4 for request in carrying.link.requests] == [0, 1, 1, 17, 17]
    carrying.check_settled()


async def test_an_answer_that_nobody_can_go_on_with_ends_with_all_that_was_delivered() -> None:
    carrying = Carrying([STARTED, delta(1), lost()], [STARTED, delta(2), lost()], [lost()], workers=2, ratio=0.1)
    with pytest.raises(Unavailable, match="after 2 tokens"):
        await resume(carrying)
    carrying.check_settled()


@pytest.mark.parametrize("max_retries", [0, 1, 3])
async def test_a_request_that_kills_its_workers_does_not_kill_them_all(max_retries: int) -> None:
    """Behaviour 53: and a fleet that keeps dying is not asked for ever."""
    short = delta(*range(HEADWAY_TOKENS - 1))
    carrying = Carrying(*([STARTED, short, lost()] for _ in range(50)), workers=30, max_retries=max_retries)
    with pytest.raises(Unavailable, match=f"after {(max_retries + 2) * (HEADWAY_TOKENS - 1)} tokens:"):
        await resume(carrying)
    assert len(carrying.tried) == max_retries + 2
    carrying.check_settled()


async def test_many_answers_that_lose_their_worker_at_once_are_all_resumed() -> None:
    """Clients asked for it: the budget, which is for retries nobody asked for, neither refuses them nor pays."""
    scripts = [script for _ in range(24) for script in ([STARTED, delta(1), lost()], [STARTED, delta(2), FINISHED])]
    carrying = Carrying(*scripts, workers=30, ratio=0.0)
    for _ in range(24):
        await resume(carrying)
    assert carrying.outcome("ok") == 24
    carrying.check_settled()


@pytest.mark.parametrize(("resumptions", "kind"), [(0, Unavailable), (12, Unavailable), (0, Overloaded)])
async def test_resumptions_leave_the_budget_to_those_it_is_for(
    resumptions: int, kind: type[Unavailable | Overloaded]
) -> None:
    resumed = [script for _ in range(resumptions) for script in ([STARTED, delta(1), lost()], [STARTED, FINISHED])]
    failing = says(kind("no place", retry_after_s=2.5, queued="7"))
    carrying = Carrying(*resumed, *([failing] for _ in range(60)), workers=30, ratio=0.1)
    for _ in range(resumptions):
        await resume(carrying)
    carrying.resumable = False
    refused: list[RadixfleetError] = []
    for _ in range(20):
        tried = len(carrying.tried)
        with pytest.raises(kind) as caught:
            await carrying.run()
        if len(carrying.tried) == tried + 1:
            refused.append(caught.value)
    assert len(refused) in range(8, 11), "ten of the burst, and a tenth of twenty"
    assert all("budget for retries is spent" in str(error) and "--retry-ratio" in str(error) for error in refused)
    assert {(error.retry_after_s, error.metadata["queued"]) for error in refused} == {(2.5, "7")}
    carrying.check_settled()


@pytest.mark.parametrize("error", [InternalError("NaN"), InvalidRequest("no"), DeadlineExceeded("late")])
async def test_what_would_fail_elsewhere_too_is_not_resumed(error: RadixfleetError) -> None:
    carrying = Carrying([STARTED, delta(1), says(error)], WHOLE)
    with pytest.raises(type(error)):
        await resume(carrying)
    assert len(carrying.tried) == 1
    carrying.check_settled()


steps = st.lists(st.sampled_from(["started", "token", "finish", "lost", "says", "hang", "pass"]), max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=1, max_size=6), st.lists(st.integers(0, 6), min_size=6, max_size=6), st.booleans())
def test_whatever_workers_and_clients_do_every_counter_returns_to_zero(
    scripts: list[list[str]], patience: list[int], resumable: bool
) -> None:
    """Behaviour 44: successes, errors, retries, hangs and cancellations at any point, several at a time."""

    def step(name: str) -> Step:
        made: dict[str, Step] = {
            "started": STARTED,
            "token": delta(1, 2),
            "finish": FINISHED,
            "lost": lost(),
            "says": says(Unavailable("no")),
            "hang": asyncio.Event(),
            "pass": 0.6,
        }
        return made[name]

    async def play() -> None:
        played = [[step(name) for name in script] for script in scripts]
        carrying = Carrying(*played, *([lost()] for _ in range(20)), workers=2)
        carrying.resumable = resumable
        tasks = [asyncio.create_task(carrying.run()) for _ in scripts]
        for turns, task in zip(patience, tasks, strict=False):
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        carrying.check_settled()
        assert all(worker.books.own_tokens >= 0 for worker in carrying.parts.workers)

    asyncio.run(play())

"""One stream of requests, without a network: what it reads, and when it writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from radixfleet.errors import InternalError, Overloaded
from radixfleet.status import error_from_status, status_pb2
from radixfleet.v1 import fleet_pb2, inference_pb2
from router.api.route_stream import A_TURN, MOST_OPEN, RouteStream
from router.dispatch.lookaside import LookAside
from tests.support.router_parts import Parts, prepared
from tests.support.waiting import until


class FakeRouting:
    """Answers at once, but for prompts that begin with "wait": those when `gate` opens. It books "lease" alone."""

    def __init__(self) -> None:
        self.parts = Parts(1)
        self.look_aside = LookAside(60.0, self.parts.metrics)
        self.gate = asyncio.Event()
        self.asked: list[str] = []
        self.address = "h:1"
        self.num_waiting = 0

    def begin(
        self, request: inference_pb2.GenerateRequest, deadline: Any, answer: fleet_pb2.RouteResponse, owner: set[str]
    ) -> Any:
        text = request.prompt.text
        self.asked.append(text)
        if text == "fault":
            raise ZeroDivisionError("a fault of ours")
        if text == "lease":
            answer.lease_id = self.look_aside.hold(self.parts.chooser.choose(prepared()), owner)
        answer.address = self.address
        return self._later if text.startswith("wait") else None

    async def _later(self) -> None:
        self.num_waiting += 1
        await self.gate.wait()
        self.num_waiting -= 1


class Wire:
    """The other side of a stream."""

    def __init__(self, *, reads: bool = True, **options: Any) -> None:
        self.routing = FakeRouting()
        self.reading = asyncio.Event()
        if reads:
            self.reading.set()
        self.break_with: Exception | None = None
        """What a write raises, when the client has gone."""
        self.written: list[fleet_pb2.RouteStreamResponse] = []
        self._sent: asyncio.Queue[fleet_pb2.RouteStreamRequest | None] = asyncio.Queue()
        self._numbers = 0
        stream = RouteStream(self.routing, self._write, **options)  # type: ignore[arg-type]  # a fake
        self.serving = asyncio.create_task(stream.serve(self._messages()))

    def ask(self, *texts: str, takes_back: bool = False) -> None:
        """All in one message, which may take them back too."""
        asks = []
        for text in texts:
            self._numbers += 1
            asks.append(fleet_pb2.RouteAsk(number=self._numbers, request={"prompt": {"text": text}}))
        cancels = [ask.number for ask in asks] if takes_back else []
        self._sent.put_nowait(fleet_pb2.RouteStreamRequest(asks=asks, cancels=cancels))

    def take_back(self, *numbers: int) -> None:
        self._sent.put_nowait(fleet_pb2.RouteStreamRequest(cancels=numbers))

    async def end(self) -> None:
        self._sent.put_nowait(None)
        await self.serving

    @property
    def num_unread(self) -> int:
        """Messages that the stream has not taken."""
        return self._sent.qsize()

    @property
    def answers(self) -> list[fleet_pb2.RouteAnswer]:
        return [answer for message in self.written for answer in message.answers]

    async def _messages(self) -> AsyncIterator[fleet_pb2.RouteStreamRequest]:
        while (message := await self._sent.get()) is not None:
            yield message

    async def _write(self, message: fleet_pb2.RouteStreamResponse) -> None:
        await self.reading.wait()
        if self.break_with is not None:
            raise self.break_with
        self.written.append(message)


async def test_an_answer_for_each_and_the_end_after_the_last() -> None:
    wire = Wire()
    wire.ask("a", "wait", "b")
    await until(lambda: len(wire.answers) == 2)
    assert [answer.number for answer in wire.answers] == [1, 3]
    assert len(wire.written) == 1
    ending = asyncio.create_task(wire.end())
    await until(lambda: not wire.num_unread)
    assert not ending.done()
    wire.routing.gate.set()
    await ending
    assert [answer.number for answer in wire.answers] == [1, 3, 2]


async def test_what_gets_ready_together_goes_out_together() -> None:
    wire = Wire(reads=False)
    wire.ask("a", *["wait"] * 30)
    await until(lambda: wire.routing.num_waiting == 30)
    wire.routing.gate.set()
    await until(lambda: wire.routing.num_waiting == 0)
    wire.reading.set()
    await wire.end()
    assert [len(message.answers) for message in wire.written] == [1, 30]


async def test_a_client_that_reads_no_answers_is_not_read_from() -> None:
    wire = Wire(reads=False)
    wire.ask("a")
    for _ in range(4):
        wire.ask(*["b"] * MOST_OPEN)
    await until(lambda: len(wire.routing.asked) == 1 + MOST_OPEN)
    await until(lambda: wire.num_unread == 3)
    wire.reading.set()
    await wire.end()
    assert len(wire.answers) == 1 + 4 * MOST_OPEN


async def test_a_client_with_too_many_open_requests_is_not_read_from() -> None:
    wire = Wire()
    for _ in range(3):
        wire.ask(*["wait"] * (MOST_OPEN // 2))
    await until(lambda: len(wire.routing.asked) == MOST_OPEN)
    await until(lambda: wire.num_unread == 1)
    wire.routing.gate.set()
    await until(lambda: len(wire.routing.asked) == 3 * MOST_OPEN // 2)
    await wire.end()
    assert len(wire.answers) == 3 * MOST_OPEN // 2


@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_is_taken_back_is_open_no_more(has_begun: bool) -> None:
    """Also by the message that asks for it, when its task has not run yet: it would keep the stream from ending."""
    wire = Wire()
    wire.ask(*["wait"] * (MOST_OPEN - 1), takes_back=not has_begun)
    if has_begun:
        await until(lambda: wire.routing.num_waiting == MOST_OPEN - 1)
        wire.take_back(*range(1, MOST_OPEN))
    wire.ask(*["wait"] * (MOST_OPEN - 1), takes_back=True)
    wire.ask("a")
    await wire.end()
    assert [answer.number for answer in wire.answers] == [2 * MOST_OPEN - 1]


async def test_a_message_of_many_asks_lets_others_have_their_turns() -> None:
    wire = Wire()
    seen = [0]
    wire.ask(*["a"] * (5 * A_TURN))
    while seen[-1] < 5 * A_TURN:
        await asyncio.sleep(0)
        seen.append(len(wire.routing.asked))
    assert max(later - earlier for earlier, later in pairwise(seen)) == A_TURN
    await wire.end()
    assert len(wire.answers) == 5 * A_TURN


async def test_messages_have_a_bounded_size() -> None:
    wire = Wire()
    wire.routing.address = "x" * 300_000
    wire.ask(*["a"] * 7)
    await wire.end()
    assert [len(message.answers) for message in wire.written] == [3, 3, 1]


async def test_a_fault_of_ours_is_the_answer_of_one_request() -> None:
    wire = Wire()
    with capture_logs() as lines:
        wire.ask("a", "fault", "b")
        await wire.end()
    by_number = {answer.number: answer for answer in wire.answers}
    error = error_from_status(status_pb2.Status.FromString(by_number[2].status))
    assert isinstance(error, InternalError)
    assert lines[0]["incident"] in str(error)
    assert "ZeroDivision" not in str(error)
    assert by_number[1].HasField("route")
    assert by_number[3].HasField("route")


async def test_each_request_counts_until_it_is_answered() -> None:
    visits: list[str] = []

    @contextmanager
    def visit():  # type: ignore[no-untyped-def]  # a context manager
        if visits.count("in") - visits.count("out") >= 2:
            raise Overloaded("two are open", retry_after_s=1.0)
        visits.append("in")
        try:
            yield
        finally:
            visits.append("out")

    wire = Wire(visit=visit)
    wire.ask("a", "b", "wait", "wait", "c")
    await until(lambda: len(wire.answers) == 3)
    assert visits == ["in", "out", "in", "out", "in", "in"]
    assert [answer.number for answer in wire.answers if answer.status] == [5]
    wire.routing.gate.set()
    await wire.end()
    assert visits.count("out") == 4


@pytest.mark.parametrize("has_begun", [False, True])
async def test_breaking_off_ends_what_waits(has_begun: bool) -> None:
    """Also a request whose task has not run yet."""
    visits: list[int] = []

    @contextmanager
    def visit():  # type: ignore[no-untyped-def]  # a context manager
        visits.append(1)
        yield
        visits.pop()

    wire = Wire(visit=visit)
    wire.ask("wait")
    await until(lambda: wire.routing.asked)
    if has_begun:
        await asyncio.sleep(0)
    wire.serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wire.serving
    assert not wire.answers
    assert not visits


@pytest.mark.parametrize("end", [grpc.aio.UsageError, grpc.aio.InternalError, grpc.aio.BaseError])
async def test_a_client_that_takes_no_answers_any_more_is_not_read_from_and_leaves_nothing_behind(
    end: type[Exception],
) -> None:
    """Behaviour 43: gRPC may tell of its end by a write alone, while a read still waits."""
    wire = Wire()
    wire.ask("wait", "lease")
    await until(lambda: len(wire.answers) == wire.routing.num_waiting == 1)
    assert len(wire.routing.look_aside) == 1
    wire.break_with = end("the call is over")
    wire.ask("a")
    await wire.serving
    wire.ask("b")
    assert (wire.routing.asked, wire.num_unread) == (["wait", "lease", "a"], 1)
    wire.routing.parts.check_settled()


async def test_a_fault_in_writing_is_not_taken_for_a_client_that_has_gone() -> None:
    wire = Wire()
    wire.break_with = ZeroDivisionError("a fault of ours")
    wire.ask("a")
    with pytest.raises(ZeroDivisionError):
        await wire.serving

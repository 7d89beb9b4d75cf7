"""The worker's end of a link, over frames in memory: what is in one frame, credit, deadlines, errors."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import ref

import grpc.aio
import pytest
from google.rpc import status_pb2
from structlog.testing import capture_logs

from radixfleet.clock import MonotonicClock
from radixfleet.errors import InternalError, InvalidRequest
from radixfleet.status import error_from_status
from radixfleet.v1 import inference_pb2, worker_pb2
from tests.support.played_answer import PlayedAnswer
from tests.support.waiting import until
from worker.servicer.link import FRAME_BYTES, Links, TimeRemaining


def delta(token_id: int, text: str = "") -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(token_ids=[token_id], text=text))


END = inference_pb2.GenerateResponse(finished=inference_pb2.Finished(usage=inference_pb2.Usage()))


class Wire:
    """A router's end: frames to send, frames received, and answers that go one step at a time."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[worker_pb2.RouterFrame | Exception | None] = asyncio.Queue()
        self.frames: list[worker_pb2.WorkerFrame] = []
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.answers: dict[str, PlayedAnswer] = {}
        self.ended: list[str] = []
        self.links = Links(self._running, MonotonicClock())
        self.serving = asyncio.create_task(self.links.serve(self._frames(), self._write))

    async def _frames(self) -> AsyncIterator[worker_pb2.RouterFrame]:
        while (frame := await self.incoming.get()) is not None:
            if isinstance(frame, Exception):
                raise frame
            yield frame

    async def _write(self, frame: worker_pb2.WorkerFrame) -> None:
        await self.can_write.wait()
        await asyncio.sleep(0)  # gRPC lets others have a turn, too
        self.frames.append(frame)

    @asynccontextmanager
    async def _running(
        self, request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining
    ) -> AsyncIterator[PlayedAnswer]:
        answer = self.answers[request.request_id] = PlayedAnswer()
        try:
            yield answer
        finally:
            self.ended.append(request.request_id)

    async def start(self, *numbers: int, credit: int = 100, timeout_s: float | None = None) -> None:
        starts = [
            worker_pb2.LinkStart(
                number=number,
                request=inference_pb2.GenerateRequest(request_id=str(number)),
                credit=credit,
                timeout_s=timeout_s,
            )
            for number in numbers
        ]
        self.incoming.put_nowait(worker_pb2.RouterFrame(starts=starts))
        await until(lambda: all(str(number) in self.answers for number in numbers))

    def step(self, number: int, *responses: inference_pb2.GenerateResponse | Exception) -> None:
        answer = self.answers[str(number)]
        for response in responses:
            if isinstance(response, Exception):
                answer.end(response)
                continue
            answer.say(response)
            if response is END:
                answer.end()

    def unsent(self, number: int) -> int:
        return len(self.answers[str(number)].waiting)

    @property
    def replies(self) -> list[worker_pb2.LinkReply]:
        return [reply for frame in self.frames for reply in frame.replies]

    async def close(self) -> None:
        self.incoming.put_nowait(None)
        await self.serving


async def test_a_step_of_many_requests_is_one_frame() -> None:
    wire = Wire()
    await wire.start(*range(1, 101))
    for number in range(1, 101):
        wire.step(number, delta(number))
    await until(lambda: len(wire.replies) == 100)
    assert len(wire.frames) == 1
    assert {(reply.number, reply.response.delta.token_ids[0]) for reply in wire.replies} == {
        (number, number) for number in range(1, 101)
    }
    await wire.close()
    assert sorted(wire.ended) == sorted(map(str, range(1, 101))), "requests end with their link"


async def test_what_comes_while_a_frame_is_written_goes_in_the_next() -> None:
    wire = Wire()
    await wire.start(1, 2)
    wire.can_write.clear()
    wire.step(1, delta(1))
    await until(lambda: not wire.unsent(1))
    for token_id in range(2, 10):
        wire.step(1, delta(token_id))
        wire.step(2, delta(token_id))
    wire.can_write.set()
    await until(lambda: len(wire.replies) == 17)
    assert len(wire.frames) == 2
    of_first = [reply.response.delta.token_ids[0] for reply in wire.replies if reply.number == 1]
    assert of_first == list(range(1, 10))
    await wire.close()


async def test_a_request_goes_no_further_than_its_credit() -> None:
    """Behaviour 57."""
    wire = Wire()
    await wire.start(1, credit=2)
    await wire.start(2, credit=100)
    for token_id in range(6):
        wire.step(1, delta(token_id))
        wire.step(2, delta(token_id))
    await until(lambda: len(wire.replies) == 8)
    assert wire.unsent(1) == 4, "what has no credit is not even asked for"
    wire.incoming.put_nowait(worker_pb2.RouterFrame(credits=[worker_pb2.LinkCredit(number=1, credit=3)]))
    await until(lambda: len(wire.replies) == 11)
    assert wire.unsent(1) == 1
    await wire.close()


async def test_cancelled_requests_and_those_out_of_time_end_and_say_nothing_more() -> None:
    wire = Wire()
    await wire.start(1)
    await wire.start(2, timeout_s=0.02)
    await wire.start(3)
    wire.incoming.put_nowait(worker_pb2.RouterFrame(cancels=[1, 77]))
    await until(lambda: sorted(wire.ended) == ["1", "2"])
    wire.step(3, delta(1), END)
    await until(lambda: len(wire.replies) == 2)
    assert {reply.number for reply in wire.replies} == {3}
    await wire.close()


async def test_what_a_cancelled_request_has_left_is_not_sent() -> None:
    """Behaviour 6: not even when credit for it comes in the same frame."""
    wire = Wire()
    await wire.start(1, credit=1)
    await wire.start(2)
    wire.step(1, delta(1), delta(2), delta(3))
    await until(lambda: len(wire.replies) == 1)
    credit = worker_pb2.LinkCredit(number=1, credit=5)
    wire.incoming.put_nowait(worker_pb2.RouterFrame(credits=[credit], cancels=[1]))
    await until(lambda: wire.ended == ["1"])
    wire.step(2, delta(1), END)
    await until(lambda: len([reply for reply in wire.replies if reply.number == 2]) == 2)
    assert [reply.number for reply in wire.replies] == [1, 2, 2]
    await wire.close()


async def test_errors_end_their_own_request_and_hide_what_is_internal() -> None:
    wire = Wire()
    await wire.start(1, 2, 3)
    wire.step(1, InvalidRequest("too hot", field="sampling.temperature"))
    wire.step(2, ZeroDivisionError("secret"))
    wire.step(3, delta(1), END)
    await until(lambda: len(wire.replies) == 4)
    errors = {
        reply.number: error_from_status(status_pb2.Status.FromString(reply.status))
        for reply in wire.replies
        if reply.WhichOneof("event") == "status"
    }
    assert isinstance(errors[1], InvalidRequest)
    assert errors[1].field == "sampling.temperature"
    assert isinstance(errors[2], InternalError)
    assert "secret" not in str(errors[2])
    await wire.close()


async def test_frames_are_bounded() -> None:
    wire = Wire()
    await wire.start(*range(1, 11))
    wire.can_write.clear()
    for number in range(1, 11):
        wire.step(number, delta(1, "x" * (FRAME_BYTES // 3)))
    wire.can_write.set()
    await until(lambda: len(wire.replies) == 10)
    assert max(frame.ByteSize() for frame in wire.frames) <= FRAME_BYTES
    await wire.close()


async def test_many_messages_do_not_make_a_frame_larger_with_what_is_around_each() -> None:
    wire = Wire()
    await wire.start(1, credit=3000)
    wire.step(1, *[delta(1, "x" * 1000) for _ in range(2500)])
    await until(lambda: len(wire.replies) == 2500)
    assert len(wire.frames) == 3
    assert max(frame.ByteSize() for frame in wire.frames) <= FRAME_BYTES
    await wire.close()


async def test_a_message_larger_than_a_frame_goes_alone() -> None:
    """So a frame is never larger than the largest message that a worker may send."""
    wire = Wire()
    await wire.start(1, 2, 3)
    wire.step(1, delta(1, "x" * (FRAME_BYTES * 9 // 10)))
    wire.step(2, delta(2, "x" * (5 * FRAME_BYTES)))
    wire.step(3, delta(3, "x" * (FRAME_BYTES // 2)))
    await until(lambda: len(wire.replies) == 3)
    assert [[reply.number for reply in frame.replies] for frame in wire.frames] == [[1], [2], [3]]
    assert [len(reply.response.delta.text) for reply in wire.replies] == [
        FRAME_BYTES * 9 // 10,
        5 * FRAME_BYTES,
        FRAME_BYTES // 2,
    ]
    await wire.close()


async def test_requests_take_turns_and_failures_do_not_wait_for_them() -> None:
    """One that has much to say, and credit for all of it, keeps nobody waiting for longer than a frame."""
    wire = Wire()
    await wire.start(1, 2, 3)
    wire.can_write.clear()
    wire.step(1, *[delta(token_id, "x" * (FRAME_BYTES // 4)) for token_id in range(30)])
    await until(lambda: wire.unsent(1) < 30)
    wire.step(2, delta(7), delta(8), END)
    wire.step(3, InvalidRequest("too hot", field="sampling.temperature"))
    wire.can_write.set()
    await until(lambda: len(wire.replies) == 34)
    frames = [[reply.number for reply in frame.replies] for frame in wire.frames]
    assert len(frames) >= 10, "of three messages each"
    assert set(frames[0]) == {1}
    assert frames[1].count(2) == 2, "in turn with those of the first"
    assert 3 in frames[2], "which had the writer's turn in the frame before, and so was over"
    assert [reply.response.delta.token_ids[0] for reply in wire.replies if reply.number == 1] == list(range(30))
    await wire.close()


async def test_an_answer_that_raises_fails_its_own_request_alone() -> None:
    wire = Wire()
    await wire.start(1, 2)
    wire.can_write.clear()
    wire.step(2, delta(1))
    await until(lambda: not wire.unsent(2))
    wire.answers["1"].say(delta(5))
    wire.answers["1"].say(ZeroDivisionError("secret"))
    wire.answers["1"].say(delta(6))
    wire.step(2, delta(2), delta(3))
    wire.can_write.set()
    await until(lambda: wire.ended == ["1"])
    wire.step(2, END)
    await until(lambda: len(wire.replies) == 6)
    first, failure = [reply for reply in wire.replies if reply.number == 1]
    assert list(first.response.delta.token_ids) == [5]
    error = error_from_status(status_pb2.Status.FromString(failure.status))
    assert isinstance(error, InternalError)
    assert "secret" not in str(error)
    whole = [reply.response for reply in wire.replies if reply.number == 2]
    assert whole == [delta(1), delta(2), delta(3), END]
    await wire.close()


async def test_a_worker_that_stops_ends_its_links() -> None:
    wire = Wire()
    await wire.start(1)
    await wire.links.close()
    async with asyncio.timeout(60):
        await wire.serving
    assert wire.ended == ["1"]


@pytest.mark.parametrize("end", ["of its own accord", "failed", "cancelled", "late"])
async def test_an_answer_that_is_over_is_held_by_nobody(end: str) -> None:
    """Not even by the frames of what ended it."""
    wire = Wire()
    gc.collect()
    gc.disable()
    try:
        await wire.start(1, timeout_s=0.01 if end == "late" else None)
        answer = ref(wire.answers["1"])
        if end == "cancelled":
            wire.incoming.put_nowait(worker_pb2.RouterFrame(cancels=[1]))
        elif end == "failed":
            wire.step(1, InvalidRequest("too hot"))
        elif end == "of its own accord":
            wire.step(1, delta(1), END)
        await until(lambda: wire.ended == ["1"])
        wire.answers.clear()
        await until(lambda: answer() is None)
    finally:
        gc.enable()
    await wire.close()


async def test_a_frame_that_cannot_be_read_ends_its_link_and_is_logged() -> None:
    """What runs on it goes elsewhere; and somebody should know why."""
    wire = Wire()
    await wire.start(1)
    with capture_logs() as logs:
        wire.incoming.put_nowait(InvalidRequest("starts[0].request.request_id is not valid UTF-8"))
        async with asyncio.timeout(60):
            await wire.serving
    assert wire.ended == ["1"]
    assert [line["log_level"] for line in logs] == ["error"]


@pytest.mark.parametrize("end", [grpc.aio.UsageError, grpc.aio.InternalError, grpc.aio.BaseError])
async def test_a_router_that_breaks_off_and_a_server_that_stops_are_no_faults(end: type[Exception]) -> None:
    """gRPC has an error of its own for each."""
    wire = Wire()
    await wire.start(1)
    with capture_logs() as logs:
        wire.incoming.put_nowait(end())
        async with asyncio.timeout(60):
            await wire.serving
    assert wire.ended == ["1"]
    assert logs == []


async def test_the_number_of_a_running_request_starts_no_other() -> None:
    wire = Wire()
    await wire.start(1, credit=1)
    first = wire.answers["1"]
    starts = [worker_pb2.LinkStart(number=1, request=inference_pb2.GenerateRequest(request_id="again"), credit=1)]
    more = [worker_pb2.LinkCredit(number=1, credit=9)]
    wire.incoming.put_nowait(worker_pb2.RouterFrame(starts=starts, credits=more))
    wire.step(1, delta(1), delta(2), END)
    await until(lambda: wire.ended == ["1"])
    assert len(wire.replies) == 3
    assert (list(wire.answers.values()), first.is_over) == ([first], True)
    await wire.close()

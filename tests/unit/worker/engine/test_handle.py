"""A request's stream: what it yields, and that it has one terminal outcome."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from radixfleet.errors import InternalError, InvalidRequest, RadixfleetError, Unavailable
from radixfleet.types import FinishReason
from tests.support.engine_fakes import submit
from tests.support.fake_engine import FakeEngine
from worker.core.logits import TokenLogprobs
from worker.core.messages import Admitted, Ended, Output, PromptLogprobs, StepOutputs
from worker.engine.handle import Progress, RequestStream

ADMITTED = Admitted(uid=1, cached_tokens=16, at_s=2.0)
STOP = Ended(uid=1, reason=FinishReason.STOP, matched_token_id=9)


def prompt_logprobs(start: int) -> PromptLogprobs:
    none = np.zeros(0, np.float32)
    return PromptLogprobs(1, start, none, np.zeros(0, np.int32), none)


class Abandoned(list[int]):
    """Takes the place of the handle: remembers who was abandoned."""

    def __call__(self, stream: RequestStream) -> None:
        self.append(stream.uid)


@pytest.fixture
def abandoned() -> Abandoned:
    return Abandoned()


@pytest.fixture
def stream(abandoned: Abandoned) -> RequestStream:
    return RequestStream(1, abandoned)


async def test_what_is_pending_comes_as_one_progress(stream: RequestStream) -> None:
    for event in (ADMITTED, Output(1, 7), Output(1, 8)):
        stream.feed(event)
    assert await anext(stream) == Progress(ADMITTED, [7, 8], None)
    stream.feed(Output(1, 9))
    stream.feed(STOP)
    assert await anext(stream) == Progress(None, [9], STOP)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_log_probabilities_come_with_their_tokens(stream: RequestStream) -> None:
    told, prompt = TokenLogprobs(-0.5, [7], [-0.5]), prompt_logprobs(start=1)
    for event in (ADMITTED, prompt, Output(1, 7, told), Output(1, 8, told)):
        stream.feed(event)
    assert await anext(stream) == Progress(ADMITTED, [7, 8], None, [told, told], [prompt])
    stream.feed(prompt)
    assert await anext(stream) == Progress(None, [], None, [], [prompt])
    stream.feed(Output(1, 9, told))
    stream.feed(prompt)
    stream.close()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_reader_waits_until_there_is_something(stream: RequestStream) -> None:
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.feed(Output(1, 7))
    assert (await reader).token_ids == [7]


async def test_a_reader_that_is_cancelled_while_waiting_loses_nothing(stream: RequestStream) -> None:
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.feed(Output(1, 7))
    reader.cancel()
    await asyncio.wait([reader])
    assert (await anext(stream)).token_ids == [7]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", InvalidRequest),
        ("INTERNAL", InternalError),
        ("UNAVAILABLE", Unavailable),
        ("NO_SUCH_CODE", InternalError),
    ],
)
async def test_a_failure_is_raised_after_the_tokens_before_it(
    stream: RequestStream, code: str, kind: type[RadixfleetError]
) -> None:
    stream.feed(Output(1, 7))
    stream.feed(Ended(1, None, code=code, message="too long"))
    assert (await anext(stream)).token_ids == [7]
    with pytest.raises(kind, match="too long"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_nothing_follows_the_terminal_outcome(stream: RequestStream, abandoned: Abandoned) -> None:
    """Behaviour 4: no output after the finish."""
    stream.feed(STOP)
    stream.feed(Output(1, 7))
    stream.feed(Ended(1, FinishReason.ABORT))
    stream.fail(Unavailable("gone"))
    stream.close()
    assert [progress async for progress in stream] == []
    assert abandoned == []


async def test_the_end_is_read_once_and_then_the_stream_is_over(stream: RequestStream) -> None:
    stream.feed(STOP)
    assert [progress.ended async for progress in stream] == [STOP]


async def test_leaving_the_block_aborts_a_request_that_runs(stream: RequestStream, abandoned: Abandoned) -> None:
    """Behaviour 6: a reader that goes away ends its request, once."""
    with stream:
        stream.feed(Output(1, 7))
    stream.close()
    assert abandoned == [1]
    stream.feed(Output(1, 8))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_wakes_a_reader(stream: RequestStream) -> None:
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(StopAsyncIteration):
        await reader


async def test_an_engine_that_is_lost_ends_the_stream_with_its_error(stream: RequestStream) -> None:
    stream.fail(Unavailable("the worker's engine restarted", retry_after_s=1.0))
    with pytest.raises(Unavailable) as caught:
        await anext(stream)
    assert caught.value.retry_after_s == 1.0


async def test_a_listener_is_told_and_takes_all_that_came(stream: RequestStream) -> None:
    stream.feed(Output(1, 7))
    taken: list[Progress | None] = []
    stream.listen(lambda: taken.append(stream.take()))
    assert [progress.token_ids for progress in taken if progress] == [[7]], "what was there already is told at once"
    stream.feed(Output(1, 8))
    stream.feed(Output(1, 9))
    stream.tell()
    assert [progress.token_ids for progress in taken if progress] == [[7], [8, 9]]
    assert stream.take() is None


async def test_a_listener_hears_of_an_engine_that_is_lost_once(stream: RequestStream) -> None:
    told: list[str] = []
    stream.listen(lambda: told.append("told"))
    stream.feed(Output(1, 7))
    stream.fail(Unavailable("lost"))
    assert not told, "the handle tells, when all streams have failed"
    stream.tell()
    assert told == ["told"]
    progress = stream.take()
    assert progress is not None
    assert progress.token_ids == [7], "tokens come before the error"
    with pytest.raises(Unavailable):
        stream.take()
    assert stream.take() is None


async def test_a_step_tells_each_listener_once() -> None:
    engine = FakeEngine()
    engine.become_ready()
    streams = [engine.submit(submit(engine.next_uid(), [1, 2, 3])) for _ in range(2)]
    told: list[int] = []
    for each in streams:
        each.listen(partial(told.append, each.uid))
    first, second = (each.uid for each in streams)
    step = [Output(first, 7), Output(second, 8), Output(first, 9)]
    engine._hear(StepOutputs([Admitted(first, 0, 0.0)], step, [Ended(second, FinishReason.LENGTH)]))
    assert told == [first, second]
    for each, token_ids in zip(streams, ([7, 9], [8]), strict=True):
        progress = each.take()
        assert progress is not None
        assert progress.token_ids == token_ids

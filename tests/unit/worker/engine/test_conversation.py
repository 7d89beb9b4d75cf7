"""The front's half of the conversation: each stream hears of its end, whatever the listeners to others do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import pytest

from radixfleet.errors import InternalError, RadixfleetError, Unavailable
from radixfleet.types import FinishReason
from tests.support.engine_fakes import submit
from tests.support.fake_engine import FakeEngine
from worker.core.messages import Child, Output, StepOutputs
from worker.engine.handle import RequestStream


async def crash(engine: FakeEngine) -> None:
    engine.crash()


ENDS = pytest.mark.parametrize("end", [crash, FakeEngine.stop], ids=["crash", "stop"])
End = Callable[[FakeEngine], Awaitable[None]]


@pytest.fixture
async def engine() -> FakeEngine:
    playing = FakeEngine()
    playing.become_ready()
    return playing


class Heard:
    """A listener that takes all that comes, and remembers how it ended."""

    def __init__(self, stream: RequestStream) -> None:
        self.token_ids: list[int] = []
        self.errors: list[RadixfleetError] = []
        self._stream = stream
        stream.listen(self)

    def __call__(self) -> None:
        try:
            while (progress := self._stream.take()) is not None:
                self.token_ids += progress.token_ids
        except RadixfleetError as error:
            self.errors.append(error)


@ENDS
async def test_who_closes_siblings_when_one_is_lost_keeps_no_other_request_waiting(
    engine: FakeEngine, end: End
) -> None:
    """Behaviour 43: an error of one completion is the end of all, also when the engine took them all."""
    request = msgspec.structs.replace(submit(engine.next_uid()), children=(Child(2, 12), Child(3, 13)))
    group = engine.submit_group(request)
    errors: list[RadixfleetError] = []

    def hear(stream: RequestStream) -> None:
        try:
            stream.take()
        except RadixfleetError as error:
            errors.append(error)
            for each in group:
                each.close()

    for stream in group:
        stream.listen(partial(hear, stream))
    other = Heard(engine.submit(submit(10)))
    assert engine.num_open == 4
    await end(engine)
    assert [type(error) for error in errors] == [Unavailable]
    assert [type(error) for error in other.errors] == [Unavailable]
    assert engine.num_open == 0
    assert engine.aborted_uids == [], "there is nobody to abort them"


@ENDS
async def test_a_listener_that_raises_keeps_nobody_from_hearing_of_a_lost_engine(engine: FakeEngine, end: End) -> None:
    first, second = [engine.submit(submit(engine.next_uid())) for _ in range(2)]
    first.listen(broken)
    heard = Heard(second)
    await end(engine)
    assert [type(error) for error in heard.errors] == [Unavailable]
    with pytest.raises(Unavailable):
        first.take()


async def test_a_listener_that_raises_fails_its_own_request_alone(engine: FakeEngine) -> None:
    first, second = [engine.submit(submit(engine.next_uid())) for _ in range(2)]
    first.listen(broken)
    heard = Heard(second)
    engine._hear(StepOutputs([], [Output(first.uid, 7), Output(second.uid, 8)], []))
    assert heard.token_ids == [8]
    assert engine.aborted_uids == [first.uid]
    assert engine.num_open == 1
    assert (await anext(first)).token_ids == [7]
    with pytest.raises(InternalError):
        await anext(first)
    engine.output(second.uid, 9)
    engine.end(second.uid, FinishReason.LENGTH)
    assert (heard.token_ids, heard.errors) == ([8, 9], [])


async def test_a_listener_that_raised_is_told_that_its_request_failed(engine: FakeEngine) -> None:
    stream = engine.submit(submit(engine.next_uid()))
    told: list[RadixfleetError] = []

    def hear() -> None:
        try:
            if stream.take() is not None:
                raise ZeroDivisionError
        except RadixfleetError as error:
            told.append(error)
        else:
            raise AssertionError("told of nothing")

    stream.listen(hear)
    engine.output(stream.uid, 7)
    assert [type(error) for error in told] == [InternalError]
    assert engine.num_open == 0


def broken() -> None:
    raise ZeroDivisionError("a listener's own fault")

"""What waits for a stream goes out in messages of bounded size, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixfleet.outgoing import MESSAGE_BYTES, Outgoing
from radixfleet.v1 import worker_pb2

PART = MESSAGE_BYTES // 4


def starts(frames: list[worker_pb2.RouterFrame]) -> list[list[int]]:
    return [[start.number for start in frame.starts] for frame in frames]


@given(st.lists(st.integers(1, 6)))
def test_all_comes_once_in_order_and_only_what_is_too_large_alone_exceeds_the_bound(parts: list[int]) -> None:
    outgoing = Outgoing(worker_pb2.RouterFrame)
    for number, size in enumerate(parts):
        outgoing.with_room_for(size * PART).starts.add(number=number)
    taken = starts(outgoing.take())
    assert [number for numbers in taken for number in numbers] == list(range(len(parts)))
    for numbers in taken:
        assert len(numbers) <= 1 or sum(parts[number] for number in numbers) <= 4
    assert starts(outgoing.take()) == [[]]


def test_what_is_small_never_goes_before_what_it_is_about() -> None:
    outgoing = Outgoing(worker_pb2.RouterFrame)
    for number in range(3):
        outgoing.with_room_for(MESSAGE_BYTES).starts.add(number=number)
        outgoing.last.cancels.append(number)
    assert [list(frame.cancels) for frame in outgoing.take()] == [[0], [1], [2]]

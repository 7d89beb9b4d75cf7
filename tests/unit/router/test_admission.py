from __future__ import annotations

import pytest

from radixfleet.clock import ManualClock
from router.admission import AdmissionQueue


def queue(max_waiting: int = 4, clock: ManualClock | None = None) -> AdmissionQueue[str]:
    """A lane for each first letter."""
    return AdmissionQueue(max_waiting, clock or ManualClock(), lambda name: name[0])


def take(waiting: AdmissionQueue[str]) -> str:
    turn = waiting.next()
    assert turn is not None
    waiting.take(turn[0])
    return turn[1]


def test_priorities_first_then_the_order_of_arrival() -> None:
    waiting = queue()
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        waiting.add(name, priority)
    assert [take(waiting) for _ in range(4)] == ["b", "d", "a", "c"]
    assert waiting.next() is None


def test_lanes_are_passed_and_the_order_over_all_others_stays() -> None:
    waiting = queue()
    for name, priority in (("long", 0), ("longer", 5), ("short", 0), ("text", 0)):
        waiting.add(name, priority)
    passed = []
    names = []
    while (turn := waiting.next(passed)) is not None:
        _, name, lane = turn
        names.append(name)
        passed.append(lane)
    assert names == ["longer", "short", "text"]
    assert [take(waiting) for _ in range(4)] == ["longer", "long", "short", "text"]


def test_lanes_are_found_anew() -> None:
    lanes = {"a": 1, "b": 1, "c": 2}
    waiting = AdmissionQueue(4, ManualClock(), lambda name: lanes[name])
    places = [waiting.add(name, 0) for name in "abc"]
    turn = waiting.next([1])
    assert turn is not None
    assert turn[1] == "c"
    lanes |= {"b": 2}
    waiting.sort()
    turn = waiting.next([1])
    assert turn is not None
    assert turn[1:] == ("b", 2)
    assert all(waiting.remove(place) for place in places)
    assert waiting.next() is None


def test_of_one_too_many_the_last_in_the_order_leaves() -> None:
    waiting = queue(2)
    waiting.add("old", 0)
    waiting.add("young", 0)
    assert waiting.displace() is None
    for name, priority, leaver in (("late", 0, "late"), ("low", -1, "low"), ("urgent", 1, "young")):
        waiting.add(name, priority)
        assert waiting.displace() == leaver
        assert waiting.displace() is None
    assert [take(waiting), take(waiting)] == ["urgent", "old"]


def test_one_that_left_is_not_served_and_leaves_once() -> None:
    waiting = queue()
    place = waiting.add("a", 0)
    waiting.add("b", 0)
    assert waiting.remove(place)
    assert not waiting.remove(place)
    assert take(waiting) == "b"


def test_the_wait_that_is_foretold_is_that_of_the_queue_at_its_recent_pace() -> None:
    clock = ManualClock()
    waiting = queue(100, clock)
    for index in range(40):
        waiting.add(str(index), 0)
    assert waiting.retry_after_s == 1.0, "nothing is known yet"
    for _ in range(20):
        clock.advance(0.5)
        take(waiting)
    assert waiting.retry_after_s == pytest.approx(20 * 0.5)
    clock.advance(9.5)
    assert waiting.retry_after_s == pytest.approx(20 * 1.0), "it has come to a stop since"


def test_an_hour_in_which_nobody_waited_does_not_make_the_queue_slow() -> None:
    clock = ManualClock()
    waiting = queue(100, clock)
    for _ in range(3):
        waiting.add("before", 0)
        take(waiting)
    clock.advance(3600.0)
    for index in range(40):
        waiting.add(str(index), 0)
    for _ in range(20):
        clock.advance(0.5)
        take(waiting)
    assert 8.0 < waiting.retry_after_s <= 10.0

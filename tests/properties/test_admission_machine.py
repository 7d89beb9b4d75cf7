"""The admission queue against a plain list, in any order of arrivals, turns and leavings."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixfleet.clock import ManualClock
from router.admission import AdmissionQueue, Place

MAX_WAITING = 4


class AdmissionMachine(RuleBasedStateMachine):
    """The model: (priority, name, lane) in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.lanes: dict[int, int] = {}
        self.queue: AdmissionQueue[int] = AdmissionQueue(MAX_WAITING, self.clock, lambda name: self.lanes[name])
        self.model: list[tuple[int, int, int]] = []
        self.places: dict[int, Place] = {}
        self.gone: list[Place] = []
        self.outcomes: dict[int, str] = {}

    def leave(self, name: int, outcome: str) -> None:
        assert name not in self.outcomes, "one outcome for each"
        self.outcomes[name] = outcome
        self.model = [entry for entry in self.model if entry[1] != name]
        self.gone.append(self.places.pop(name))

    @rule(priority=st.integers(-2, 2), lane=st.integers(0, 2))
    def add(self, priority: int, lane: int) -> None:
        name = len(self.places) + len(self.outcomes)
        self.lanes[name] = lane
        self.places[name] = self.queue.add(name, priority)
        self.model.append((priority, name, lane))
        last = max(self.model, key=lambda entry: (-entry[0], entry[1]))
        is_one_too_many = len(self.model) > MAX_WAITING
        displaced = self.queue.displace()
        if is_one_too_many:
            assert displaced == last[1]
            self.leave(displaced, "displaced")
        else:
            assert displaced is None

    @rule(moved=st.integers(1, 2))
    def sort(self, moved: int) -> None:
        self.model = [(priority, name, (lane + moved * name) % 3) for priority, name, lane in self.model]
        self.lanes |= {name: lane for _, name, lane in self.model}
        self.queue.sort()

    @rule(seconds=st.floats(0, 100), passed=st.sets(st.integers(0, 2)))
    def take(self, seconds: float, passed: set[int]) -> None:
        self.clock.advance(seconds)
        others = [entry for entry in self.model if entry[2] not in passed]
        turn = self.queue.next(passed)
        if turn is None:
            assert not others
            return
        place, first, lane = turn
        assert lane == self.lanes[first]
        assert first == min(others, key=lambda entry: (-entry[0], entry[1]))[1]
        assert place == self.places[first]
        self.queue.take(place)
        self.leave(first, "served")

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.model))[1]
        assert self.queue.remove(self.places[name])
        self.leave(name, "left")

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def remove_one_that_is_gone(self, data: st.DataObject) -> None:
        assert not self.queue.remove(data.draw(st.sampled_from(self.gone)))

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.model) <= MAX_WAITING
        assert (self.queue.next() is None) == (not self.model)
        assert 0.05 <= self.queue.retry_after_s <= 60.0


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAdmission = AdmissionMachine.TestCase

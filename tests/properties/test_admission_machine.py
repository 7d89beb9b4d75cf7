"""The admission queue against a plain list, in any order of arrivals, turns and leavings."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixfleet.clock import ManualClock
from router.admission import AdmissionQueue, Place, QueueFull

MAX_WAITING = 4


class AdmissionMachine(RuleBasedStateMachine):
    """The model: (priority, name, lane) in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.queue: AdmissionQueue[int] = AdmissionQueue(MAX_WAITING, self.clock)
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
        last = max(self.model, key=lambda entry: (-entry[0], entry[1]), default=None)
        is_full = len(self.model) == MAX_WAITING
        try:
            place, displaced = self.queue.add(name, priority, lane)
        except QueueFull:
            assert is_full
            assert last is not None
            assert priority <= last[0]
            self.outcomes[name] = "refused"
            return
        if is_full:
            assert last is not None
            assert priority > last[0]
            assert displaced == last[1]
            self.leave(displaced, "displaced")
        else:
            assert displaced is None
        self.places[name] = place
        self.model.append((priority, name, lane))

    @rule(seconds=st.floats(0, 100), passed=st.sets(st.integers(0, 2)))
    def take(self, seconds: float, passed: set[int]) -> None:
        self.clock.advance(seconds)
        others = [entry for entry in self.model if entry[2] not in passed]
        turn = self.queue.next(passed)
        if turn is None:
            assert not others
            return
        place, first = turn
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
        assert [self.queue.holds(lane) for lane in range(3)] == [
            any(entry[2] == lane for entry in self.model) for lane in range(3)
        ]
        assert 0.05 <= self.queue.retry_after_s <= 60.0


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAdmission = AdmissionMachine.TestCase

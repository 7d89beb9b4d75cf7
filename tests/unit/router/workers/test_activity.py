"""What the workers did lately, whatever becomes of them meanwhile."""

from dataclasses import dataclass, field

import pytest

from radixfleet.clock import ManualClock
from radixfleet.rates import PromptTokens, Totals
from router.workers.activity import FleetActivity, WorkerActivity


@dataclass
class Worker:
    clock: ManualClock
    activity: WorkerActivity = field(init=False)

    def __post_init__(self) -> None:
        self.activity = WorkerActivity(self.clock)

    def says(self, tokens: int) -> None:
        """It has generated so many tokens since its engine started."""
        self.activity.heard(lambda: Totals(requests=tokens, steps=tokens, generated_tokens=tokens))


class Fleet:
    def __init__(self, workers: int = 1) -> None:
        self.clock = ManualClock()
        self.workers = [Worker(self.clock) for _ in range(workers)]
        self.activity = FleetActivity(lambda: self.workers, self.clock)

    def tick(self, seconds: float = 1.0) -> None:
        self.clock.advance(seconds)
        self.activity.tick()

    def generated(self) -> tuple[int, int]:
        """By the fleet, in the short and the long stretch."""
        short, long = self.activity.recent()
        return short.totals.generated_tokens, long.totals.generated_tokens


def test_the_first_word_of_a_worker_is_where_counting_begins():
    fleet = Fleet()
    fleet.workers[0].says(1_000_000)
    fleet.tick()
    assert fleet.generated() == (0, 0)
    fleet.workers[0].says(1_000_050)
    fleet.tick()
    assert fleet.generated() == (50, 50)


def test_what_comes_between_the_first_word_and_the_first_tick_counts():
    fleet = Fleet()
    fleet.workers[0].says(1_000)
    fleet.workers[0].says(1_007)
    fleet.tick()
    assert fleet.generated() == (7, 7)


def test_the_short_stretch_forgets_before_the_long_one():
    fleet = Fleet()
    for second in range(1, 31):
        fleet.workers[0].says(10 * second)
        fleet.tick()
    short, long = fleet.activity.recent()
    assert 9.9 <= short.seconds <= 12.1
    assert short.totals.generated_tokens == pytest.approx(10 * short.seconds)
    assert long.totals.generated_tokens == 290
    for _ in range(20):
        fleet.tick()
    assert fleet.generated() == (0, 290)
    for _ in range(80):
        fleet.tick()
    assert fleet.generated() == (0, 0)


def test_a_restarted_engine_counts_from_zero_and_nothing_is_lost_or_negative():
    fleet = Fleet()
    worker = fleet.workers[0]
    worker.says(100)
    fleet.tick()
    worker.says(150)
    fleet.tick()
    worker.activity.restarted()
    worker.says(7)
    fleet.tick()
    assert fleet.generated() == (57, 57)


def test_what_a_removed_worker_did_stays():
    fleet = Fleet(2)
    for worker in fleet.workers:
        worker.says(0)
    fleet.tick()
    for worker in fleet.workers:
        worker.says(10)
    fleet.tick()
    del fleet.workers[0]
    fleet.tick()
    assert fleet.generated() == (20, 20)


def test_prompts_are_counted_where_they_ran_and_in_the_fleet():
    fleet = Fleet(2)
    fleet.workers[0].activity.started(800, 700, 640, 576)
    fleet.workers[1].activity.started(10, 0, 0, 0)
    fleet.tick()
    assert fleet.workers[0].activity.recent()[-1].prompt_tokens == PromptTokens(800, 700, 640, 576, 64)
    assert fleet.activity.recent()[-1].prompt_tokens == PromptTokens(810, 700, 640, 576, 64)


def test_totals_are_read_once_a_tick_however_many_came():
    fleet = Fleet()
    fleet.workers[0].says(0)
    reads: list[int] = []
    for number in range(5):
        fleet.workers[0].activity.heard(lambda number=number: reads.append(number) or Totals(requests=number))
    fleet.tick()
    fleet.tick()
    assert reads == [4]


def test_steps_are_what_happened_between_two_marks():
    fleet = Fleet()
    fleet.workers[0].says(0)
    fleet.tick()
    for second in range(1, 9):
        fleet.workers[0].says(5 * second)
        fleet.tick()
    steps = fleet.activity.steps()
    assert [round(recent.seconds) for _, recent in steps] == [2, 2, 2, 2]
    assert sum(recent.totals.generated_tokens for _, recent in steps) == 35
    assert [at_s for at_s, _ in steps] == [2.0, 4.0, 6.0, 8.0]


def test_memory_is_bounded():
    fleet = Fleet()
    for _ in range(2000):
        fleet.tick()
    assert len(fleet.activity.steps()) == 300
    assert len(fleet.workers[0].activity.steps()) == 30


@pytest.mark.parametrize(
    ("predicted", "actual", "missed"),
    [
        (0, 48, 0),  # three pages, and no whole block: nobody could have predicted them
        (64, 112, 0),
        (127, 112, 0),  # of a prompt of 128 tokens, whose last page is computed again
        (128, 127, 64),
        (64, 128, 64),
        (640, 0, 640),
    ],
)
def test_predictions_are_held_against_what_could_be_predicted_whole_blocks(predicted: int, actual: int, missed: int):
    """Of short prompts, the rest of a block is much: it made good predictions look bad."""
    fleet = Fleet()
    fleet.workers[0].activity.started(700, predicted, predicted, actual)
    fleet.tick()
    assert fleet.activity.recent()[0].prompt_tokens == PromptTokens(700, predicted, predicted, actual, missed)

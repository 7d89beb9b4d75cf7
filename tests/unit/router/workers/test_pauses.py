"""How long a lost worker is left alone."""

from __future__ import annotations

from random import Random

from router.workers.pauses import LASTING_S, Pauses


class Longest(Random):
    """Draws the upper end."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_one_that_cannot_be_reached_is_asked_less_and_less_often() -> None:
    pauses = Pauses(Longest())
    assert [pauses.next_s(0.0) for _ in range(8)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_so_is_one_whose_connection_never_holds() -> None:
    """It answers each time, and its state stream ends at once: nobody may ask it a thousand times a second."""
    pauses = Pauses(Longest())
    assert [pauses.next_s(LASTING_S / 100) for _ in range(4)] == [0.0, 0.1, 0.2, 0.4]


def test_one_whose_connection_held_is_asked_at_once() -> None:
    pauses = Pauses(Longest())
    for _ in range(9):
        pauses.next_s(0.0)
    assert [pauses.next_s(LASTING_S), pauses.next_s(0.0)] == [0.0, 0.1]


def test_pauses_are_spread() -> None:
    drawn = [Pauses(Random(seed)) for seed in range(50)]
    for pauses in drawn:
        pauses.next_s(0.0)
    seconds = [pauses.next_s(0.0) for pauses in drawn]
    assert 0.05 <= min(seconds) < 0.06
    assert 0.09 < max(seconds) <= 0.1

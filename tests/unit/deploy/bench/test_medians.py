"""Intervals of medians."""

import random

import pytest

from deploy.bench.medians import median_interval


@pytest.mark.parametrize(("num", "place"), [(6, 0), (8, 0), (9, 1), (24, 6), (100, 39)])
def test_the_places_are_those_of_the_tables_for_the_sign_test(num: int, place: int) -> None:
    assert median_interval(range(num)) == (place, num - 1 - place)


def test_too_few_values_say_nothing() -> None:
    assert median_interval([]) is None
    assert median_interval([1.0] * 5) is None


def test_the_true_median_lies_in_it_as_often_as_promised() -> None:
    draw = random.Random(0)
    intervals = [median_interval([draw.expovariate(1.0) for _ in range(15)]) for _ in range(2000)]
    hits = sum(low <= 0.693147 <= high for low, high in filter(None, intervals))
    assert 0.95 <= hits / len(intervals) <= 0.98

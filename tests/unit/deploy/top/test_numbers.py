"""Numbers on the screen are short, and do not jump."""

import pytest

from deploy.top.bars import stacked, trend
from deploy.top.numbers import age, duration, percent, quantity, rate


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (9499.6, "9,500"),
        (9999.4, "9,999"),
        (12_345, "12.3k"),
        (99_960, "100k"),
        (999_499, "999k"),
        (1_234_000, "1.2M"),
        (5e9, "5.0G"),
        (1e16, "1e+16"),
    ],
)
def test_quantity(value, text):
    assert quantity(value) == text
    assert len(text) <= 6


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (0.12, "0.1"), (9.94, "9.9"), (9.96, "10"), (250.4, "250")])
def test_rate(value, text):
    assert rate(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0042, "4.2ms"), (0.0854, "85ms"), (0.9996, "1.00s"), (1.236, "1.24s"), (75.02, "75.0s")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (3 * 3600 + 300, "3 h 5 min"), (2e5, "2 d 7 h")]
)
def test_age(seconds, text):
    assert age(seconds) == text


def test_percent():
    assert (percent(None), percent(0.874), percent(0.0042, 1)) == ("-", "87%", "0.4%")


def test_a_bar_is_as_wide_as_asked_whatever_the_parts():
    for used in range(12):
        bar = stacked(((used, "a"), (5, "b")), 10, 8)
        assert len(bar.plain) == 8
    assert stacked(((5, "a"),), 10, 8).plain == "████····"
    assert stacked(((0, "a"),), 0, 4).plain == "····"
    assert stacked(((20, "a"),), 10, 4).plain == "████"


def test_a_trend_shows_the_newest_values():
    assert trend([1, 2, 4, 8], 3) == "▃▅█"
    assert trend([0, 0], 4) == "  ▁▁"
    assert trend([], 2) == "  "

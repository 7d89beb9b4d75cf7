"""Charts: well-formed, and true to their values."""

from xml.etree import ElementTree

import numpy as np
import pytest

from loadtest.svg import HEIGHT, WIDTH, BarGroup, Line, bars, lines, number


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def heights(svg: str) -> list[float]:
    return [float(rect.attrib["height"]) for rect in parsed(svg).iter("rect")]


def points(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in curve.attrib["points"].split())]
        for curve in parsed(svg).iter("polyline")
    ]


def labels(svg: str) -> list[str]:
    return [text.text or "" for text in parsed(svg).iter("text")]


class TestBars:
    def test_are_as_high_as_their_values(self):
        svg = bars([BarGroup("one", [("a", 0, 10.0), ("b", 1, 5.0)]), BarGroup("two", [("a", 0, 0.0)])], "s")
        tall, half, nothing = heights(svg)
        assert half == pytest.approx(tall / 2, abs=0.2)
        assert nothing == 0
        assert {"one", "two", "s", "0"} <= set(labels(svg))

    def test_say_what_they_are_under_the_pointer(self):
        svg = bars([BarGroup("p99", [("a < b", 0, 1234.5)])], "ms")
        assert [title.text for title in parsed(svg).iter("title")] == ["a < b, p99: 1,234 ms"]

    def test_a_mark_is_drawn_at_its_height(self):
        svg = bars([BarGroup("", [("a", 0, 0.5)])], "", mark=("ceiling", 1.0))
        line = next(line for line in parsed(svg).iter("line") if line.get("class") == "mark")
        bottom = max(float(other.attrib["y1"]) for other in parsed(svg).iter("line"))
        assert heights(svg)[0] == pytest.approx((bottom - float(line.attrib["y1"])) / 2, abs=0.2)
        assert "ceiling 1" in labels(svg)

    def test_on_a_logarithmic_axis_equal_ratios_are_equal_steps(self):
        svg = bars([BarGroup("", [("a", 0, 0.01), ("b", 1, 0.1), ("c", 2, 1.0)])], "s", log=True)
        low, middle, high = heights(svg)
        assert high - middle == pytest.approx(middle - low, abs=0.3)
        assert high > middle > low

    @pytest.mark.parametrize("log", [False, True])
    @pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [1e-9, 1e9], [3.0, 3.0]])
    def test_draw_whatever_there_is(self, values: list[float], log: bool):
        svg = bars([BarGroup("g", [(str(i), i, value) for i, value in enumerate(values)])], "s", log=log)
        assert all(0 <= height <= HEIGHT for height in heights(svg))


class TestLines:
    def test_go_through_their_points_from_left_to_right_and_upwards(self):
        svg = lines([Line("a", 0, [0.0, 5.0, 10.0], [0.0, 1.0, 2.0])], "s", "requests")
        [(start, middle, end)] = points(svg)
        assert middle == (
            pytest.approx((start[0] + end[0]) / 2, abs=0.2),
            pytest.approx((start[1] + end[1]) / 2, abs=0.2),
        )
        assert start[0] < end[0] <= WIDTH
        assert start[1] > end[1] >= 0
        assert {"s", "requests"} <= set(labels(svg))

    def test_long_curves_are_thinned_and_keep_their_ends(self):
        xs = np.arange(100_000, dtype=float)
        [long] = points(lines([Line("a", 0, xs, xs)], "", ""))
        [short] = points(lines([Line("a", 0, [0.0, 99_999.0], [0.0, 99_999.0])], "", ""))
        assert len(long) <= 400
        assert (long[0], long[-1]) == (short[0], short[-1])

    def test_a_logarithmic_axis_takes_a_zero(self):
        [curve] = points(lines([Line("a", 0, [0.0, 0.01, 0.1, 1.0], [0.0, 0.2, 0.5, 1.0])], "s", "", log_x=True))
        xs = [x for x, _ in curve]
        assert xs[3] - xs[2] == pytest.approx(xs[2] - xs[1], abs=0.3)
        assert xs[0] == xs[1]

    @pytest.mark.parametrize("log_x", [False, True])
    def test_draw_whatever_there_is(self, log_x: bool):
        assert points(lines([], "s", "", log_x=log_x)) == []
        assert points(lines([Line("a", 0, [], [])], "s", "", log_x=log_x)) == [[]]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00012, "1.2e-04"), (0.0123, "0.0123"), (1.0, "1"), (9.876, "9.88"), (1234567.8, "1,234,568")],
)
def test_numbers_have_three_digits(value: float, text: str):
    assert number(value) == text

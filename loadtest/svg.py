"""Small charts as SVG text: grouped bars and lines. No scripts and no files beside them.

Colours are CSS variables (`--c0`, `--c1`, ... for series, `--ink`, `--faint`), so that the page decides on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 620, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 42
_MAX_POINTS = 400

Values = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. `color` is the number of its series."""

    name: str
    color: int
    xs: Values
    ys: Values


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars that stand together: for each its name, the number of its series, and its value."""

    label: str
    bars: Sequence[tuple[str, int, float]]


class _Scale:
    """From values to places on an axis, linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool) -> None:
        self.log = log
        if log:
            high = max(high, 1e-9)
            low = max(min(low, high), high / 1e6)
            self.low, self.high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
            if self.low == self.high:
                self.low /= 10
        else:
            self.low, self.high = low, high if high > low else low + 1
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """Place of a value."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round values along the axis."""
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= min((factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 5), default=10)
        count = int((self.high - self.low) / step + 1e-9)
        return [self.low + index * step for index in range(count + 1)]


def bars(groups: Sequence[BarGroup], unit: str, *, log: bool = False, mark: tuple[str, float] | None = None) -> str:
    """Grouped bars. `mark`: a named line across them."""
    values = [value for group in groups for _, _, value in group.bars]
    top = max([*values, mark[1] if mark else 0.0], default=1.0)
    scale = _Scale(min((v for v in values if v > 0), default=top) if log else 0.0, top, HEIGHT - _BOTTOM, _TOP, log=log)
    parts = _y_axis(scale, unit)
    width = (WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    for place, group in enumerate(groups):
        left = _LEFT + place * width
        bar = min(0.8 * width / max(1, len(group.bars)), 40.0)
        begin = left + (width - bar * len(group.bars)) / 2
        for index, (name, color, value) in enumerate(group.bars):
            y = scale.at(value)
            parts.append(
                f'<rect x="{begin + index * bar:.1f}" y="{y:.1f}" width="{max(bar - 1.5, 1):.1f}" '
                f'height="{max(HEIGHT - _BOTTOM - y, 0):.1f}" fill="var(--c{color})">'
                f"<title>{escape(name)}, {escape(group.label)}: {number(value)} {escape(unit)}</title></rect>"
            )
        parts.append(_text(left + width / 2, HEIGHT - _BOTTOM + 16, group.label, "middle"))
    if mark:
        y = scale.at(mark[1])
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="mark"/>')
        parts.append(_text(WIDTH - _RIGHT, y - 4, f"{mark[0]} {number(mark[1])}", "end"))
    return _svg(parts)


def lines(curves: Sequence[Line], x_unit: str, y_unit: str, *, log_x: bool = False) -> str:
    """Curves over one another."""
    xs = [float(x) for curve in curves for x in _thinned(curve.xs)]
    ys = [float(y) for curve in curves for y in _thinned(curve.ys)]
    low = min((x for x in xs if x > 0), default=1.0) if log_x else min(xs, default=0.0)
    across = _Scale(low, max(xs, default=1.0), _LEFT, WIDTH - _RIGHT, log=log_x)
    up = _Scale(0.0, max(ys, default=1.0), HEIGHT - _BOTTOM, _TOP, log=False)
    parts = _y_axis(up, y_unit)
    for tick in across.ticks():
        parts.append(_text(across.at(tick), HEIGHT - _BOTTOM + 16, number(tick), "middle"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x_unit, "middle"))
    for curve in curves:
        points = " ".join(
            f"{across.at(float(x)):.1f},{up.at(float(y)):.1f}"
            for x, y in zip(_thinned(curve.xs), _thinned(curve.ys), strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="var(--c{curve.color})" stroke-width="2">'
            f"<title>{escape(curve.name)}</title></polyline>"
        )
    return _svg(parts)


def number(value: float) -> str:
    """Three digits, without an exponent where people need none."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def _y_axis(scale: _Scale, unit: str) -> list[str]:
    parts = [
        f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})" class="unit">{escape(unit)}</text>'
    ]
    for tick in scale.ticks():
        y = scale.at(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 6, y + 4, number(tick), "end"))
    return parts


def _thinned(values: Values) -> Values:
    if len(values) <= _MAX_POINTS:
        return values
    return [values[index] for index in np.linspace(0, len(values) - 1, _MAX_POINTS).astype(int)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'

"""Numbers as an operator reads them: few digits, aligned, with a unit. "-" where nothing is known."""

from __future__ import annotations

UNKNOWN = "-"

_UNITS = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))


def quantity(value: float) -> str:
    """At most six characters: 950, 9,500, 12.3k, 123k, 1.2M."""
    if value < 9_999.5:
        return f"{value:,.0f}"
    for unit, size in _UNITS[1:]:
        scaled = value / size
        if scaled < 999.5:
            return f"{scaled:.1f}{unit}" if scaled < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0e}"


def rate(value: float) -> str:
    """Something a second: one decimal below 10."""
    return f"{value:.1f}" if 0 < value < 9.95 else quantity(value)


def percent(share: float | None, decimals: int = 0) -> str:
    """A share of 1: 87%."""
    return UNKNOWN if share is None else f"{100 * share:.{decimals}f}%"


def duration(seconds: float | None) -> str:
    """A latency: 8.5ms, 85ms, 1.24s, 12.3s."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}ms" if seconds >= 0.00995 else f"{1000 * seconds:.1f}ms"
    return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"


def age(seconds: float) -> str:
    """Of a process: 45 s, 12 min, 3 h 5 min, 2 d 4 h."""
    minutes = int(seconds) // 60
    hours = minutes // 60
    if not minutes:
        return f"{int(seconds)} s"
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"

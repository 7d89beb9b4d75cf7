"""Bars of characters: shares of a whole, side by side, to the eighth of a character."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉"
_HEIGHTS = "▁▂▃▄▅▆▇█"


def stacked(parts: Sequence[tuple[float, str]], whole: float, width: int) -> Text:
    """A bar of `width` characters: each part (size, style) in turn, what is left of `whole` as ground.

    Borders between two parts are rounded to characters, the last one to an eighth.
    """
    bar = Text()
    done, at = 0.0, 0
    for index, (size, style) in enumerate(parts):
        done += max(0.0, size)
        end = min(float(width), width * done / whole) if whole > 0 else 0.0
        is_last = index == len(parts) - 1
        full = int(end) if is_last else round(end)
        if full > at:
            bar.append("█" * (full - at), style)
            at = full
        eighth = _EIGHTHS[int(8 * (end - full))] if is_last and at == full < width else " "
        if eighth != " ":
            bar.append(eighth, style)
            at += 1
    bar.append("·" * (width - at), "bright_black")
    return bar


def trend(values: Sequence[float], width: int) -> str:
    """The last `width` values as columns, the tallest of them being full."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    columns = "".join(_HEIGHTS[min(7, int(8 * value / top))] if top > 0 else _HEIGHTS[0] for value in shown)
    return columns.rjust(width)

"""Numbers on the command line."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number, within bounds if there are any.

    Python reads "nan" and "inf" as numbers, and no comparison ever refuses a NaN.
    """

    name = "number"

    def _describe_range(self) -> str:
        """What help says of the bounds; nothing where there are none (click writes x<=None then)."""
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises BadParameter for what is no number, not finite, or out of bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number

"""How sure a median is: pairs of rounds on a machine that others use too differ by far more than what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

Interval = tuple[float, float]

_CONFIDENCE = 0.95


def median_interval(values: Sequence[float]) -> Interval | None:
    """Where the true median lies, with at least 95 % confidence, whatever the distribution.

    The classic interval of order statistics: the true median lies outside the k-th smallest and k-th largest value only
    when fewer than k of n fair coins fall on one side. None where even the smallest and largest do not suffice: 0.95
    takes six values.
    """
    num = len(values)
    in_order = sorted(values)
    interval = None
    outside = 0.0
    for place in range(num // 2):
        outside += 2 * comb(num, place) / 2**num  # exactly so many of the coins fall on one side, or on the other
        if outside > 1 - _CONFIDENCE:
            break
        interval = in_order[place], in_order[-1 - place]
    return interval

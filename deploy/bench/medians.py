"""How sure a median is: pairs of rounds on a machine that others use too differ by far more than what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

Interval = tuple[float, float]


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Where the true median lies, with at least this `confidence`, whatever the distribution.

    The classic interval of order statistics: the true median lies outside the k-th smallest and k-th largest value only
    when fewer than k of n fair coins fall on one side. None where even the smallest and largest do not suffice: 0.95
    takes six values.
    """
    num = len(values)
    outside = 0.0
    k = 0
    while outside + 2 * comb(num, k) / 2**num <= 1 - confidence:
        outside += 2 * comb(num, k) / 2**num
        k += 1
    in_order = sorted(values)
    return (in_order[k - 1], in_order[-k]) if k else None

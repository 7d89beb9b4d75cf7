"""How many requests may be tried again, in all."""

from __future__ import annotations

_BURST = 10.0


class RetryBudget:
    """A retry costs 1; each request earns `ratio`, up to a burst of 10, which is also what there is at the start.

    When every worker fails, retries add `ratio` to the load in the long run, and not another load of the same size.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._saved = _BURST if ratio else 0.0

    def earn(self) -> None:
        """A new request came in."""
        self._saved = min(self._saved + self._ratio, _BURST)

    def spend(self) -> bool:
        """Take one retry; False when the budget is spent."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

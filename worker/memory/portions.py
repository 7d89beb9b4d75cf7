"""Cuts long work into portions of about a millisecond: whoever does it when idle is never far from a new request."""

from __future__ import annotations

_PORTION = 8_192
"""Units of work; one is about what a token takes whose hash is computed again (0.1 us)."""
PER_NODE = 256
"""Units that a node of a tree takes, however short it is."""


class Portions:
    """Says when a generator that works in portions should yield: `if portions.spend(units): yield`."""

    def __init__(self, size: int = _PORTION) -> None:
        self._size = size
        self._spent = 0

    def spend(self, units: int) -> bool:
        """Account for work that was done. True when it was enough for this portion; the next begins."""
        self._spent += units
        if self._spent < self._size:
            return False
        self._spent = 0
        return True

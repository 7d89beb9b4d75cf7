"""Time, passed in. Durations come from a monotonic clock; tests and simulations pass their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time in seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock: its values can be compared between processes of one machine."""

    def now(self) -> float:
        """Seconds since the machine's start."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        """The time it was set to."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, which must not be negative."""
        if seconds < 0:
            raise ValueError("a monotonic clock cannot go back")
        self._now_s += seconds

"""The machine's clock, which leaps when a test says so: what must not have passed by chance has not."""

from __future__ import annotations

import time


class LeapingClock:
    """See the module. Never goes back, unless a test takes a leap back."""

    def __init__(self) -> None:
        self.leapt_s = 0.0

    def now(self) -> float:
        """Seconds since an arbitrary origin."""
        return time.monotonic() + self.leapt_s

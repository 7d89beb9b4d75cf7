"""The one clock of a simulation."""

from __future__ import annotations


class VirtualClock:
    """Stands still until it is set. Set rather than advanced, so that a moment is exactly what its event says."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """The moment of the current event."""
        return self._now_s

    def set(self, now_s: float) -> None:
        """Go to the next event. Raises ValueError for one that is past."""
        if now_s < self._now_s:
            raise ValueError(f"time goes from {self._now_s} back to {now_s}")
        self._now_s = now_s

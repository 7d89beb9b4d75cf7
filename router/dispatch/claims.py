"""Which workers requests wait for: none that comes behind them gets those, so that nobody is passed for ever.

Made anew by each walk through a queue, and of use in one turn of the event loop.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from router.fleet_view import FleetView


class Claims:
    """On workers of one group."""

    def __init__(self) -> None:
        self._claimed: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        """By slot, up to the highest of those that are claimed."""

    def add(self, workers: FleetView) -> None:
        """A request waits for any of these."""
        slots = workers.columns.slots
        missing = int(slots.max(initial=-1)) + 1 - len(self._claimed)
        if missing > 0:
            self._claimed = np.concatenate([self._claimed, np.zeros(missing, dtype=np.bool_)])
        self._claimed[slots] = True

    def left(self, workers: FleetView) -> FleetView:
        """Those of `workers` that nobody waits for."""
        slots = workers.columns.slots
        if not len(self._claimed) or not len(slots):
            return workers
        is_known = slots < len(self._claimed)
        is_left = ~(is_known & self._claimed[np.where(is_known, slots, 0)])
        return workers if is_left.all() else workers.only(np.flatnonzero(is_left))

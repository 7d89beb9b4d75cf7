"""Which workers requests wait for: none that comes behind them gets those, so that nobody is passed for ever.

Made anew by each walk through a queue, and of use in one turn of the event loop.
"""

from __future__ import annotations

from router.fleet_view import FleetView
from router.workers.group import ModelGroup


class Claims:
    """On workers of one group."""

    def __init__(self) -> None:
        self._slots: set[int] = set()
        self.cover_all = False
        """Of the group: nobody else gets anything."""

    def add(self, workers: FleetView, group: ModelGroup) -> None:
        """A request waits for any of these."""
        if workers is group.view:  # as nearly always, and then they need not be counted
            self.cover_all = True
            return
        self._slots.update(workers.columns.slots.tolist())
        self.cover_all = len(self._slots) == len(group.workers)

    def left(self, workers: FleetView) -> FleetView:
        """Those of `workers` that nobody waits for."""
        if self.cover_all:
            return workers.only(())
        if not self._slots:
            return workers
        slots = workers.columns.slots.tolist()
        return workers.only(position for position, slot in enumerate(slots) if slot not in self._slots)

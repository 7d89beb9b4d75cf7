"""What a client of `Fleet.WatchFleet` knows: its updates, put together again. One for each stream."""

from __future__ import annotations

from radixfleet import heard
from radixfleet.answers import FleetReport, WorkerEntry
from radixfleet.v1 import fleet_pb2


class WatchedFleet:
    """The fleet as of the last update."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerEntry] = {}
        """By address."""

    def take(self, update: fleet_pb2.FleetUpdate) -> FleetReport:
        """The fleet as it is now."""
        if update.snapshot:
            self._workers.clear()
        for address in update.removed:
            self._workers.pop(address, None)
        self._workers.update({worker.address: heard.worker_entry(worker) for worker in update.workers})
        return FleetReport(heard.fleet_state(update.fleet), tuple(self._workers.values()))

"""Orders that another router process on the same ports was given, and passes on to this one."""

from __future__ import annotations

from radixfleet.status import Context
from radixfleet.v1 import fleet_pb2, worker_pb2
from router.api.fleet import FleetServicer


class PassedOrders(FleetServicer):
    """`Fleet` for the other processes: it carries out their orders here, and passes them on to nobody."""

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Context) -> fleet_pb2.RegisterResponse:
        """A worker registered."""
        added = self._registry.add(request.address, repeats=request.repeats)
        return fleet_pb2.RegisterResponse(added=added)

    async def Remove(self, request: fleet_pb2.RemoveRequest, context: Context) -> fleet_pb2.RemoveResponse:
        """A worker was removed."""
        self._registry.remove(self._registry.get(request.worker_id))
        return fleet_pb2.RemoveResponse()

    async def Resume(self, request: fleet_pb2.ResumeWorkerRequest, context: Context) -> worker_pb2.ResumeResponse:
        """A worker was put back to work: this process may have been the one that drained it."""
        self._registry.resumed(self._registry.get(request.worker_id))
        return worker_pb2.ResumeResponse()

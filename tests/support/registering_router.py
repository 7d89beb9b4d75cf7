"""A router of which workers see the registration alone."""

from __future__ import annotations

import grpc.aio

from radixfleet.channel import listen, make_server
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc


class RegisteringRouter(fleet_pb2_grpc.FleetServicer):
    """The part of a router that workers call."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.repeats: set[bool] = set()
        self.removed: list[str] = []
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> RegisteringRouter:
        self._server, _ = await make_server(["radixfleet.v1.Fleet"])
        fleet_pb2_grpc.add_FleetServicer_to_server(self, self._server)
        self.port = listen(self._server, "127.0.0.1", port)
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def Register(self, request: fleet_pb2.RegisterRequest, context: object) -> fleet_pb2.RegisterResponse:
        self.registered.append(request.address)
        self.repeats.add(request.repeats)
        return fleet_pb2.RegisterResponse(added=len(self.registered) == 1)

    async def Remove(self, request: fleet_pb2.RemoveRequest, context: object) -> fleet_pb2.RemoveResponse:
        self.removed.append(request.worker_id)
        return fleet_pb2.RemoveResponse()

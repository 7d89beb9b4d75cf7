"""Answers `Fleet.RouteStream` with a constant and chooses nothing: what gRPC alone takes, for `bench_router_path`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from radixfleet.accepted import ACCEPTED
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc


class EchoRouter(fleet_pb2_grpc.FleetServicer):
    """Sends every request to one worker; an answer for each message, as it comes."""

    def __init__(self, worker: str) -> None:
        self._route = fleet_pb2.RouteResponse(worker_id="w0", address=worker, lease_s=60.0)

    async def RouteStream(  # type: ignore[override]  # writes to the context, as the router does
        self,
        request_iterator: AsyncIterator[fleet_pb2.RouteStreamRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """The constant, under the number of each ask."""
        await context.send_initial_metadata(ACCEPTED)
        async for message in request_iterator:
            answers = [fleet_pb2.RouteAnswer(number=ask.number, route=self._route) for ask in message.asks]
            await context.write(fleet_pb2.RouteStreamResponse(answers=answers))


async def serve(address_file: Path, worker: str) -> None:
    """Until the process is ended."""
    server = grpc.aio.server()
    fleet_pb2_grpc.add_FleetServicer_to_server(EchoRouter(worker), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.to_thread(address_file.write_text, f"127.0.0.1:{port}\n")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))

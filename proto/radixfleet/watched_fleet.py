"""What a client of `Fleet.WatchFleet` knows: its updates, put together again. One for each stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc.aio

from radixfleet import heard
from radixfleet.answers import FleetReport, WorkerEntry
from radixfleet.errors import Unavailable, Unreachable
from radixfleet.status import broke, error_from_rpc
from radixfleet.v1 import fleet_pb2

SILENCE_S = 15.0
"""A router says something every five seconds: three times nothing, and it hangs, or the network is gone."""


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


async def reports(
    call: grpc.aio.UnaryStreamCall[fleet_pb2.WatchFleetRequest, fleet_pb2.FleetUpdate], address: str
) -> AsyncGenerator[FleetReport, None]:
    """The fleet after each update of one stream from the router at `address`. Ends with an error alone.

    Raises RadixfleetError: Unreachable when the connection breaks, Unavailable when the router stops or is silent.
    """
    watched, updates = WatchedFleet(), aiter(call)
    update: fleet_pb2.FleetUpdate | None = None
    try:
        while True:
            async with asyncio.timeout(SILENCE_S):
                update = await anext(updates)
            yield watched.take(update)
    except StopAsyncIteration:
        raise Unavailable("the router ended the stream: watch again") from None
    except TimeoutError:
        raise Unavailable(
            f"the router at {address} has been silent for {SILENCE_S:g} s: is its process stopped, or the network down?"
        ) from None
    except grpc.aio.AioRpcError as error:
        if update is not None and broke(error):
            raise Unreachable(f"the connection to the router at {address} was lost") from error
        raise error_from_rpc(error) from error
    finally:
        call.cancel()

"""Router processes that share the ports of one machine, as one of them sees the others.

A connection reaches one of the processes, whichever the kernel picks, and stays there. What it orders of the fleet
(a worker registers, is removed, goes back to work) holds for all of them, so the one that is told tells the others.
Each listens on a socket of its own in a folder that only their user may enter; beside it lies a file that says that it
serves, and where its metrics are. All else they learn from the workers, as routers on several machines do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import structlog

from radixfleet.channel import open_channel
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc

_TELL_S = 2.0

_log = structlog.get_logger("radixfleet.router")


@dataclass(frozen=True, slots=True)
class Place:
    """The files by which one process is known to those that share its ports."""

    folder: Path
    index: int

    @property
    def socket(self) -> str:
        """gRPC's name of the socket on which the process hears the others."""
        return f"unix:{self.folder / f'{self.index}.sock'}"

    @property
    def file(self) -> Path:
        """There while the process serves; holds the port of its metrics."""
        return self.folder / f"{self.index}.metrics"

    def announce(self, metrics_port: int) -> None:
        """Say that the process serves. Blocks."""
        partial = self.file.with_suffix(".partial")
        partial.write_text(str(metrics_port))
        partial.replace(self.file)

    def withdraw(self) -> None:
        """Say that the process is gone. Blocks."""
        self.file.unlink(missing_ok=True)
        Path(self.socket.removeprefix("unix:")).unlink(missing_ok=True)

    def others(self) -> Iterator[Place]:
        """The others that serve now. Blocks."""
        for name in sorted(os.listdir(self.folder)):
            stem, _, kind = name.partition(".")
            if kind == "metrics" and int(stem) != self.index:
                yield Place(self.folder, int(stem))


class OtherProcesses:
    """The other processes of this router (none without a place). On the event loop, but for `metrics_ports`."""

    def __init__(self, place: Place | None = None) -> None:
        self._place = place
        self._channels: dict[int, grpc.aio.Channel] = {}

    def metrics_ports(self) -> list[int]:
        """Of the others that serve. Blocks."""
        ports = []
        for place in self._place.others() if self._place else ():
            with suppress(OSError, ValueError):  # it has just ended
                ports.append(int(place.file.read_text()))
        return ports

    async def tell(self, method: str, order: Any) -> None:
        """Call this method of `Fleet` at each of them. One that cannot be told hears of it when it starts again."""
        await asyncio.gather(*[self._ask(place, method, order) for place in await self._others()])

    async def workers(self) -> list[str]:
        """Addresses of the workers that the others know; for one that starts."""
        asked = [self._ask(place, "ListWorkers", fleet_pb2.ListWorkersRequest()) for place in await self._others()]
        answers = await asyncio.gather(*asked)
        return [entry.address for answer in answers if answer is not None for entry in answer.workers]

    async def close(self) -> None:
        """Close the channels to them."""
        await asyncio.gather(*[channel.close(None) for channel in self._channels.values()])

    async def _others(self) -> list[Place]:
        place = self._place
        return await asyncio.to_thread(lambda: list(place.others())) if place is not None else []

    async def _ask(self, place: Place, method: str, request: Any) -> Any | None:
        channel = self._channels.get(place.index)
        if channel is None:
            channel = self._channels[place.index] = open_channel(place.socket)
        try:
            return await getattr(fleet_pb2_grpc.FleetStub(channel), method)(request, timeout=_TELL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                _log.warning("another router process cannot be told", process=place.index, error=error.details())
            return None

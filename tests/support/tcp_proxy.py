"""A TCP proxy whose connections can be cut, as when a client's machine loses power or a cable is pulled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class CuttableProxy:
    """Passes bytes both ways. Made by `cuttable_proxy`."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Break every connection, without a goodbye."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, far_writer]
        with suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        writer.transport.abort()
        far_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def cuttable_proxy(target: str) -> AsyncIterator[CuttableProxy]:
    """A proxy in front of host:port."""
    proxy = CuttableProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        proxy.cut()
        server.close()
        await server.wait_closed()

"""A TCP proxy that tests can cut or freeze: what a crashed machine, or a hung process, looks like from outside."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class CuttableWire:
    """Passes bytes between its own port and a target. Use as an async context manager."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> CuttableWire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, and every new one until `mend`."""
        self._refuses = True
        for writer in tuple(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        """Keep connections and pass nothing on until `mend`."""
        self._flows.clear()

    def mend(self) -> None:
        """Work again."""
        self._refuses = False
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        self._writers.add(writer)  # before its other end is there: what is cut meanwhile is closed, too
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        if writer.is_closing():
            self._writers.discard(writer)
            far_writer.transport.abort()
            return
        self._writers.add(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await source.read(65536):
                    await self._flows.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.transport.abort()

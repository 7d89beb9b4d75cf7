"""HTTP by hand, for tests: bytes go out as they are given, and connections close when a test says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error object."""
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event; "[DONE]" as it is."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == "", "the last event is whole"
        data = [line.removeprefix("data: ") for line in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


class Connection:
    """A connection on which requests are sent one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """One request; its answer is not read."""
        sent = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (sent | (headers or {})).items())]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        async with asyncio.timeout(TIMEOUT_S):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes:
        """The next chunk of an answer that comes in chunks; empty: it is over."""
        async with asyncio.timeout(TIMEOUT_S):
            size = int(await self._reader.readline(), 16)
            return (await self._reader.readexactly(size + 2))[:-2]

    async def answer(self) -> Answer:
        """The next answer, whole."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            chunks = []
            while part := await self.chunk():
                chunks.append(part)
            return Answer(status, headers, b"".join(chunks))
        async with asyncio.timeout(TIMEOUT_S):
            return Answer(status, headers, await self._reader.readexactly(int(headers["content-length"])))

    async def until_closed(self) -> bytes:
        """Whatever else comes before the other side closes."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._reader.read()

    def abort(self) -> None:
        """Leave at once, as a process that dies."""
        self._writer.transport.abort()


@asynccontextmanager
async def connected(port: int, host: str = "127.0.0.1") -> AsyncIterator[Connection]:
    """A connection to a server on this machine."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


async def get(port: int, path: str, **headers: str) -> Answer:
    """One GET on a connection of its own."""
    async with connected(port) as connection:
        await connection.send("GET", path, headers=headers)
        return await connection.answer()


async def post(port: int, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
    """One POST of JSON, or of bytes as they are."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with connected(port) as connection:
        await connection.send("POST", path, raw, headers)
        return await connection.answer()

"""Connections on which no request begins, or whose head does not end, are closed."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import PlainTextResponse

from router.http.server import HttpServer
from router.http.slow_clients import PatientProtocol

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(PatientProtocol, "head_s", 0.2)
    server = HttpServer(PlainTextResponse("hello"), "127.0.0.1", 0)
    server.start()
    yield server.port
    await server.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the server closes."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, b"\r\n"])
async def test_a_head_that_does_not_end_ends_the_connection(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await rest(reader) == b""
    writer.close()


async def test_a_head_that_trickles_does_not_hold_the_connection(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def trickle() -> None:
        writer.write(HEAD)
        while True:
            writer.write(b"X-More: 1\r\n")
            await asyncio.sleep(0.01)

    trickling = asyncio.create_task(trickle())
    assert await rest(reader) == b""
    trickling.cancel()
    writer.close()


async def test_the_second_request_of_a_connection_has_to_end_its_head_as_well(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"\r\n")
    answer = await reader.readuntil(b"hello")
    assert answer.startswith(b"HTTP/1.1 200")
    writer.write(HEAD)
    assert await rest(reader) == b""
    writer.close()


async def test_whole_requests_are_answered_one_after_the_other(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(HEAD + b"\r\n")
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
    writer.close()

"""Connections on which no request begins, or whose head does not end, are closed; of closed ones nothing is kept.

And what clients ask for that the server does not do costs them nothing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from radixfleet.guard import Guard
from router.http import incoming
from router.http.app import HttpApp
from router.http.protocol import MAX_HEAD_BYTES, CarefulProtocol
from router.http.server import HttpServer
from tests.support.waiting import until

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpServer]:
    monkeypatch.setattr(CarefulProtocol, "head_s", 0.2)
    server = HttpServer(PlainTextResponse("hello"), "127.0.0.1", 0)
    server.start()
    yield server
    await server.close()


@pytest.fixture
def port(server: HttpServer) -> int:
    return server.port


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


@pytest.mark.parametrize(
    "piece", [b"X-Long: " + b"x" * MAX_HEAD_BYTES, b"X-Short: 1\r\n" * 6000, b"x" * MAX_HEAD_BYTES]
)
@pytest.mark.parametrize("requests_before", [0, 1])
async def test_a_head_that_grows_without_end_ends_the_connection(
    server: HttpServer, piece: bytes, requests_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of a hundred megabytes was kept, and copied for each piece of it that came."""
    monkeypatch.setattr(CarefulProtocol, "head_s", 600.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(requests_before):
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(b"hello")
    begun, more = HEAD[:5], HEAD[5:] + piece
    writer.write(begun)
    connections = server._server.server_state.connections
    await until(lambda: any(connection._deadline is not None for connection in connections), "the head has begun")
    writer.write(more[: MAX_HEAD_BYTES + 1])
    assert (await rest(reader)).startswith(b"HTTP/1.1 400")
    writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1),
    ],
    ids=["no request", "two lengths", "no chunk", "long head"],
)
async def test_what_is_no_request_gets_an_error_object(sent: bytes) -> None:
    """It got text, which clients of OpenAI's API do not read."""

    async def reading(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    server = HttpServer(reading, "127.0.0.1", 0)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    writer.close()
    await server.close()


async def test_a_body_that_stops_coming_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept for a minute after its 408."""
    monkeypatch.setattr(incoming, "PAUSE_S", 0.05)

    async def whole(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await request.body())

    server = HttpServer(HttpApp([Route("/v1/x", whole, methods=["POST"])], Guard()), "127.0.0.1", 0)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
    assert (await rest(reader)).startswith(b"HTTP/1.1 408")
    writer.close()
    await server.close()


async def test_a_long_body_is_no_head(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000)
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_of_a_connection_that_was_reset_nothing_is_kept(server: HttpServer) -> None:
    """Proxies reset connections that idle: each was kept until it would have idled for too long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEAD + b"\r\n")
    await reader.readuntil(b"hello")
    (connection,) = connections = server._server.server_state.connections
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await until(lambda: not connections, "the server has heard of it")
    assert connection.timeout_keep_alive_task is None


async def test_a_body_whose_answer_was_given_before_its_end_does_not_hold_the_connection(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte behind the answer stopped the clock by which idle connections are closed."""
    monkeypatch.setattr(CarefulProtocol, "rest_s", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
    await reader.readuntil(b"hello")
    writer.write(b"x")
    assert await rest(reader) == b""
    writer.close()


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
FORMS = [
    UPGRADE + b"Content-Length: 11\r\n\r\nUpgrade: x\n",
    UPGRADE + b"Transfer-Encoding: chunked\r\n\r\nb\r\nUpgrade: x\n\r\n0\r\n\r\n",
]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    received = b""
    while scope["path"] != "/early" and (message := await receive())["type"] == "http.request":
        received += message["body"]
        if not message.get("more_body"):
            break
    assert b"upgrade" not in dict(scope["headers"])
    await PlainTextResponse(received)(scope, receive, send)


@pytest.fixture
async def echoing() -> AsyncIterator[HttpServer]:
    server = HttpServer(echo, "127.0.0.1", 0)
    server.start()
    yield server
    await server.close()


async def answered(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"Upgrade: x\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("form", FORMS)
async def test_a_client_that_would_rather_speak_http_2_loses_no_body(echoing: HttpServer, form: bytes) -> None:
    """Java's asks so in each request, and got 400 for its empty body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", echoing.port)
    for _ in range(2):
        writer.write(POST + form)
        await answered(reader)
    writer.write(POST + form + POST + form)
    for _ in range(2):
        await answered(reader)
    writer.write(POST.replace(b" / ", b" /early ") + b"Content-Length: 3\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"abc" + POST + form)
    await answered(reader)
    writer.write(POST + b"Connection: close\r\n" + form)
    await answered(reader)
    assert await rest(reader) == b""
    writer.close()


@pytest.mark.parametrize("form", FORMS)
async def test_nor_does_one_whose_request_comes_byte_by_byte(echoing: HttpServer, form: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echoing.port)
    connections = echoing._server.server_state.connections
    await until(lambda: len(connections) == 1, "it is connected")
    (connection,) = connections
    request = HEAD + b"\r\n" + POST + form
    for place in range(len(request)):
        connection.data_received(request[place : place + 1])
    await answered(reader)
    writer.close()


async def test_a_proxy_it_is_not(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n" + UPGRADE + b"\r\n")
    assert (await rest(reader)).startswith(b"HTTP/1.1 400")
    writer.close()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("second", [b"X: " + b"x" * MAX_HEAD_BYTES, b"\0\r\n"])
async def test_a_wrong_head_writes_nothing_into_the_answer_before_it(second: bytes, *, begun: bool) -> None:
    waiting = asyncio.Event()

    async def slow(_scope: Scope, _receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hel", "more_body": True})
        waiting.set()
        await asyncio.Event().wait()

    server = HttpServer(slow, "127.0.0.1", 0)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEAD + b"\r\n")
    await waiting.wait()
    (connection,) = server._server.server_state.connections
    connection.data_received(HEAD)
    connection.data_received(second)
    assert b" 400 " not in await rest(reader)
    writer.close()
    for task in server._server.server_state.tasks:
        task.cancel()
    await server.close()


@pytest.mark.parametrize(
    "more", [b"\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"], ids=["nothing", "a body"]
)
async def test_a_connection_is_idle_when_nothing_more_is_to_come(more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came behind an answer stopped the clock that closes idle connections, or left one that resets them."""
    monkeypatch.setattr("router.http.server._KEEP_ALIVE_S", 0.2)
    server = HttpServer(PlainTextResponse("hello"), "127.0.0.1", 0)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEAD + b"\r\n")
    await reader.readuntil(b"hello")
    writer.write(more)
    if more.strip():
        await reader.readuntil(b"hello")
        writer.write(b"x" * 10)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    await server.close()


async def test_a_connection_whose_next_head_began_during_an_answer_is_not_idle() -> None:
    going, idle = asyncio.Event(), []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        idle.append(connection.timeout_keep_alive_task)
        await going.wait()
        await PlainTextResponse("hello")(scope, receive, send)

    server = HttpServer(slow, "127.0.0.1", 0)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    connections = server._server.server_state.connections
    await until(lambda: len(connections) == 1, "it is connected")
    (connection,) = connections
    connection.data_received(HEAD + b"\r\n" + HEAD)
    going.set()
    async with asyncio.timeout(20):
        await reader.readuntil(b"hello")
        writer.write(b"\r\n")
        await reader.readuntil(b"hello")
    assert idle == [None, None]
    writer.close()
    await server.close()


async def _pour(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer without end, that notices when nobody is left."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    leaving = asyncio.create_task(_gone(receive))
    while not leaving.done():
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def test_a_client_that_reads_nothing_for_long_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request, and the worker that computes it, were held for as long as its machine was up."""
    monkeypatch.setattr(CarefulProtocol, "stall_s", 0.2)
    server = HttpServer(_pour, "127.0.0.1", 0)
    server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(HEAD + b"\r\n")
    await until(lambda: server._server.server_state.tasks)
    [task] = server._server.server_state.tasks
    await until(task.done)
    writer.close()
    await server.close()


async def _in_pieces(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one ", b"two ", b""):
        await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})


@pytest.mark.parametrize(("version", "body"), [(b"1.0", b"one two "), (b"1.1", b"4\r\none \r\n4\r\ntwo \r\n0\r\n\r\n")])
async def test_a_client_of_http_1_0_gets_no_chunks(version: bytes, body: bytes) -> None:
    server = HttpServer(_in_pieces, "127.0.0.1", 0)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/%s\r\nHost: x\r\nConnection: close\r\n\r\n" % version)
    head, _, told = (await rest(reader)).partition(b"\r\n\r\n")
    assert told == body
    assert (b"transfer-encoding" in head) is (version == b"1.1")
    writer.close()
    await server.close()

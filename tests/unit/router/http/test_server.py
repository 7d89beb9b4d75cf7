"""Where the server listens, and what one request leaves to the next on its connection: nothing."""

from __future__ import annotations

import socket
from contextvars import ContextVar

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from router.http.server import HttpServer
from tests.support.http_client import connected

LONG = b"x" * 1_000_000


async def test_a_request_with_a_long_body_leaves_its_context_to_nobody() -> None:
    """Its trace and its session were those of every later request on the connection."""
    mark: ContextVar[str] = ContextVar("mark", default="none")
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(mark.get())
        mark.set(scope["path"])
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    server = HttpServer(app, "127.0.0.1", 0)
    server.start()
    async with connected(server.port) as connection:
        for path in ("/first", "/second"):
            await connection.send("POST", path, LONG)
            assert (await connection.answer()).status == 200
    await server.close()
    assert seen == ["none", "none"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_every_interface_is_that_of_both_protocols(host: str) -> None:
    """As the ports of gRPC and metrics have it: with --host :: nobody reached HTTP by IPv4."""
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    server = HttpServer(PlainTextResponse("hello"), "::", 0)
    server.start()
    async with connected(server.port, host) as connection:
        await connection.send("GET", "/")
        assert (await connection.answer()).body == b"hello"
    await server.close()


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False

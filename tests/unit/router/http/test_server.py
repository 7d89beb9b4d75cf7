"""What one request leaves to the next on its connection: nothing."""

from __future__ import annotations

from contextvars import ContextVar

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

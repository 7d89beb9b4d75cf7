"""The doors of HTTP paths, and clients that let a body wait. What a whole router does is in tests/security."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from radixfleet.errors import Unavailable
from radixfleet.guard import Door, Guard, caller_name
from radixfleet.keys import key_hash
from router.http import incoming
from router.http.errors import TooSlow
from router.http.guard import HttpGuard, door_of
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("method", "path", "door"),
    [
        ("GET", "/health", Door.OPEN),
        ("HEAD", "/health", Door.OPEN),
        ("POST", "/health", Door.ADMIN),
        ("GET", "/healthy", Door.CLIENT),
        ("GET", "/v1/models", Door.CLIENT),
        ("GET", "/metrics", Door.CLIENT),
        ("GET", "/", Door.CLIENT),
        ("POST", "/v1/chat/completions", Door.CLIENT),
        ("DELETE", "/v1/responses/1", Door.CLIENT),
        ("POST", "/v1", Door.ADMIN),
        ("POST", "/console/api/explain", Door.CLIENT),
        ("POST", "/console/api/workers/w/drain", Door.ADMIN),
        ("DELETE", "/whatever/comes/next", Door.ADMIN),
        ("PROPFIND", "/", Door.ADMIN),
    ],
)
def test_doors(method: str, path: str, door: Door) -> None:
    assert door_of(method, path) is door


class Exchange:
    """One request, given to an application piece by piece, and what it sends."""

    def __init__(self, method: str = "POST", path: str = "/v1/x", **headers: str) -> None:
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": pairs,
            "client": ("10.0.0.1", 5),
        }
        self.pieces: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []

    def give(self, body: bytes, *, more: bool) -> None:
        self.pieces.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


async def read_all(_: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with the size of the body, and waits for its client to leave."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            await send({"type": "http.response.start", "status": size, "headers": []})


async def test_a_body_that_stops_coming_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "PAUSE_S", 0.01)
    exchange = Exchange()
    exchange.give(b"half", more=True)
    with pytest.raises(TooSlow):
        await HttpGuard(read_all, Guard())(exchange.scope, exchange.pieces.get, exchange.send)


async def test_a_body_that_trickles_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "TOTAL_S", 0.05)
    exchange = Exchange()

    async def trickle() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(TooSlow):
        async with asyncio.timeout(20):
            await HttpGuard(read_all, Guard())(exchange.scope, trickle, exchange.send)


async def test_large_bodies_that_are_not_whole_are_bounded_together_and_small_ones_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve connections that sent 59 MiB each, and no end, took 700 MB."""
    monkeypatch.setattr(incoming, "SMALL_BYTES", 10)
    guard = HttpGuard(read_all, Guard(), 100)
    first, second, third, small = (Exchange() for _ in range(4))
    for exchange in (first, second, third):
        exchange.give(b"x" * 60, more=True)
    waiting = [asyncio.create_task(guard(first.scope, first.pieces.get, first.send))]
    await until(lambda: guard._room.used_bytes == 50, "the first body is on its way")
    waiting.append(asyncio.create_task(guard(second.scope, second.pieces.get, second.send)))
    await until(lambda: guard._room.used_bytes == 100, "and the second")
    with pytest.raises(Unavailable) as refused:
        await guard(third.scope, third.pieces.get, third.send)
    assert refused.value.retry_after_s
    for exchange in (small, first):
        exchange.give(b"y" * 10, more=False)
    waiting.append(asyncio.create_task(guard(small.scope, small.pieces.get, small.send)))
    await until(lambda: small.sent and first.sent, "both are whole")
    assert (small.status, first.status) == (10, 70)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert guard._room.used_bytes == 0


async def test_after_the_body_an_application_may_wait_for_its_client_as_long_as_it_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incoming, "PAUSE_S", 0.0)
    monkeypatch.setattr(incoming, "TOTAL_S", 30.0)
    waits: list[float | None] = []
    exchange = Exchange(method="GET", path="/")
    exchange.give(b"", more=False)
    exchange.pieces.put_nowait({"type": "http.disconnect"})
    real_timeout = asyncio.timeout

    def timeout(delay: float | None) -> Any:
        waits.append(delay)
        return real_timeout(20)

    monkeypatch.setattr(incoming.asyncio, "timeout", timeout)
    await HttpGuard(read_all, Guard())(exchange.scope, exchange.pieces.get, exchange.send)
    assert waits == [0.0]  # for the body; not for what comes after it


async def test_the_application_knows_the_name_of_the_key_and_never_the_key() -> None:
    names: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        names.append(caller_name())

    guard = HttpGuard(app, Guard(lambda: {key_hash("rfk_1"): "alice"}, lambda: ["token-0123456789"]))
    for key in ("rfk_1", "token-0123456789"):
        exchange = Exchange(authorization=f"Bearer {key}")
        await asyncio.create_task(guard(exchange.scope, exchange.pieces.get, exchange.send))
    assert names == ["alice", "admin"]
    assert caller_name() == ""


async def test_a_refused_request_ends_its_connection_because_its_body_is_still_to_come() -> None:
    refused = Exchange(authorization="Bearer rfk_2")
    guard = HttpGuard(read_all, Guard(dict, list))
    await guard(refused.scope, refused.pieces.get, refused.send)
    assert (refused.status, refused.headers["connection"]) == (401, "close")
    looking = Exchange(method="GET")
    await guard(looking.scope, looking.pieces.get, looking.send)
    assert looking.status == 401
    assert "connection" not in looking.headers


@pytest.mark.parametrize(
    ("origin", "host"), [("http://[x", "h"), ("http://[x", "[x"), ("http://a]b", "a]b"), ("[", "["), ("", "h")]
)
async def test_an_origin_that_is_none_is_another_site(origin: str, host: str) -> None:
    """It was an internal error, with a traceback in the log."""
    exchange = Exchange(origin=origin, host=host)
    await HttpGuard(read_all, Guard())(exchange.scope, exchange.pieces.get, exchange.send)
    assert exchange.status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8080", "[::1]:8080", "[::1]", "localhost:1"])
async def test_a_page_at_an_address_may_ask(host: str) -> None:
    exchange = Exchange(origin=f"http://{host}", host=host)
    exchange.give(b"x" * 200, more=False)
    exchange.pieces.put_nowait({"type": "http.disconnect"})
    await HttpGuard(read_all, Guard())(exchange.scope, exchange.pieces.get, exchange.send)
    assert exchange.status == 200


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"x_radixfleet_console": "1"}, 403)])
async def test_a_token_mistyped_in_the_console_is_not_unauthenticated(headers: dict[str, str], status: int) -> None:
    """At 401 a browser forgets the key that it has: the page went blind until it was loaded again."""
    guard = HttpGuard(read_all, Guard(dict, lambda: ["token-0123456789"]))
    for key, told in (("wrong", status), (None, 401)):
        exchange = Exchange(**headers, **({"authorization": f"Bearer {key}"} if key else {}))
        await guard(exchange.scope, exchange.pieces.get, exchange.send)
        assert exchange.status == told

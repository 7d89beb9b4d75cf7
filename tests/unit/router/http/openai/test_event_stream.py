from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from router.http.openai import event_stream
from router.http.openai.event_stream import EventStream
from tests.support.waiting import until


class Client:
    """What is written comes here; nothing is taken while the gate is closed."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, message: Message) -> None:
        await self.gate.wait()
        self.taken.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.taken)


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.02)


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    """Balancers hang up after 60 s, while a request waited in the queue or a long prompt was computed."""
    client = Client()
    stream = EventStream(client.send)
    async with stream.kept_alive():
        await until(lambda: client.body.count(b":\n\n") >= 3)
        stream.put(b"{}")
        await stream.flush()
    await stream.end()
    assert client.taken[0]["status"] == 200
    assert client.body.replace(b":\n\n", b"") == b"data: {}\n\n"
    assert [message["more_body"] for message in client.taken[1:]][-1] is False


async def test_a_client_that_takes_nothing_gets_one_comment() -> None:
    client = Client()
    client.gate.clear()
    stream = EventStream(client.send)
    async with stream.kept_alive():
        await until(lambda: stream.has_begun)
        comment = stream._comment
        await asyncio.sleep(0.2)
        assert stream._comment is comment
        client.gate.set()
    assert client.body == b":\n\n"


async def test_what_fails_early_has_said_nothing() -> None:
    client = Client()
    stream = EventStream(client.send)
    with pytest.raises(ValueError, match="early"):
        async with stream.kept_alive():
            raise ValueError("early")
    assert not stream.has_begun
    await asyncio.sleep(0.1)
    assert client.taken == []

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

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


def let_silence_pass(stream: EventStream) -> None:
    """As after SILENCE_S."""
    timer = stream._looking
    assert timer is not None
    timer._run()
    timer.cancel()


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    """Balancers hang up after 60 s, while a request waited in the queue or a long prompt was computed."""
    client = Client()
    stream = EventStream(client.send)
    async with stream.kept_alive():
        for count in range(1, 4):
            let_silence_pass(stream)
            await until(lambda count=count: client.body.count(b":\n\n") == count)
            let_silence_pass(stream)  # it was written since the last time
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
        for _ in range(3):
            let_silence_pass(stream)
            await asyncio.sleep(0)
        assert stream.has_begun
        client.gate.set()
    assert client.body == b":\n\n"


async def test_what_fails_early_has_said_nothing() -> None:
    client = Client()
    stream = EventStream(client.send)
    with pytest.raises(ValueError, match="early"):
        async with stream.kept_alive():
            raise ValueError("early")
    assert not stream.has_begun
    assert stream._looking is not None
    assert stream._looking.cancelled()
    assert client.taken == []

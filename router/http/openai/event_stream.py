"""Server-sent events, written as ASGI messages. The first write sends the head of the response, and with it status 200.

A write waits until the client takes it, so a slow reader holds back its own request. Where nothing comes for long, as
before the first token of a long prompt, empty comments are written: proxies and load balancers hang up on connections
that are silent for a minute or less.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Send

_HEAD = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


SILENCE_S = 30.0
"""Between two writes, or up to twice as long. A request that fails before has a status of its own."""
_COMMENT = b":\n\n"


class EventStream:
    """One response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending = bytearray()
        self._turn = asyncio.Lock()
        self._is_silent = True
        """Since the last look."""
        self._looking: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self.has_begun = False
        """Too late for another status."""

    def put(self, data: bytes, name: str = "") -> None:
        """Add an event to the next write."""
        if name:
            self._pending += b"event: %s\n" % name.encode()
        self._pending += b"data: "
        self._pending += data
        self._pending += b"\n\n"

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """While the block lasts, comments are written when nothing else is."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            self._looking = loop.call_later(SILENCE_S, look)
            if self._is_silent and (self._comment is None or self._comment.done()):
                self._pending += _COMMENT
                self._comment = loop.create_task(self.flush(), name="comment")
            self._is_silent = True

        self._looking = loop.call_later(SILENCE_S, look)
        try:
            yield
        finally:
            self._looking.cancel()
            if self._comment is not None:
                await self._comment

    async def flush(self) -> None:
        """Write what was put. Several tasks may call it."""
        async with self._turn:
            if self._pending:
                await self._write(more=True)

    async def end(self) -> None:
        """Write what was put, and end the response."""
        await self._write(more=False)

    async def _write(self, *, more: bool) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEAD})
        self._is_silent = False
        body, self._pending = bytes(self._pending), bytearray()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

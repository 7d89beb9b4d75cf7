"""Server-sent events, written as ASGI messages. The first write sends the head of the response, and with it status 200.

A write waits until the client takes it, so a slow reader holds back its own request.
"""

from __future__ import annotations

import asyncio

from starlette.types import Send

_HEAD = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


class EventStream:
    """One response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending = bytearray()
        self._turn = asyncio.Lock()
        self.has_begun = False
        """Too late for another status."""

    def put(self, event: bytes) -> None:
        """Add an event to the next write."""
        self._pending += b"data: "
        self._pending += event
        self._pending += b"\n\n"

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
        body, self._pending = bytes(self._pending), bytearray()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

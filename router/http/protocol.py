"""uvicorn's protocol, with more care for clients, and against them.

uvicorn limits how long a connection may be idle between requests, and not how long a request may take to begin, nor how
large its head may be, nor how long the rest of a body may take that was answered before its end: clients that send a
line a minute would hold as many connections as they like, and one line of a hundred megabytes, which is copied for each
piece of it that comes, the event loop. What a body may take that is waited for is `guard`'s matter.

Java's HTTP client asks to upgrade to HTTP/2 in each request. The parser takes what follows the head for the other
protocol, so that the body is lost; so it is not shown the question, which a server may ignore.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 15.0
"""From the connection, or from the first byte of a further request, to the end of the headers."""
REST_S = 60.0
"""For the rest of a body whose answer was given before its end, and the next head."""
MAX_HEAD_BYTES = 64 * 1024
_UPGRADE = re.compile(rb"(?<![^\n])upgrade(?=[ \t]*:)", re.IGNORECASE)


class CarefulProtocol(HttpToolsProtocol):
    """One connection. On the event loop."""

    head_s = HEAD_S
    rest_s = REST_S
    _deadline: asyncio.TimerHandle | None = None
    """Of a head."""
    _rest: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Of the head that is awaited; what came together with the end of the request before it is not counted."""

    def connection_made(self, transport: Any) -> None:
        """The client has so long for its first request."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """More of a head, or of a body."""
        awaited = self._deadline
        if self.cycle is None or not self.cycle.more_body:
            data = _without_upgrade(data)
        super().data_received(data)
        if awaited is None or self._deadline is not awaited or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The head of the request has more than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A further request begins on the same connection."""
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._forget()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """An answer is out; what still comes of its request would stop the clock that closes idle connections."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._rest = self.loop.call_later(self.rest_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more to wait for. uvicorn itself keeps a connection that was reset until it would have been idle."""
        self._forget()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        self.transport.abort()

    def _forget(self) -> None:
        for timer in (self._deadline, self._rest):
            if timer is not None:
                timer.cancel()
        self._deadline = self._rest = None


def _without_upgrade(data: bytes) -> bytes:
    """A piece of a head, and perhaps of the body behind it, with another name for the header."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if _UPGRADE.search(data, 0, end) is None:
        return data
    return _UPGRADE.sub(b"ignored", data[:end]) + data[end:]

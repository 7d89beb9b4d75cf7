"""uvicorn's protocol, with an end to patience: a client that connects must have sent a request's head within a while.

uvicorn limits how long a connection may be idle between requests, and not how long a request may take to begin; clients
that send a header line a minute would hold as many connections as they like. What a body may take is `guard`'s matter.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 15.0
"""From the connection, or from the first byte of a further request, to the end of the headers."""


class PatientProtocol(HttpToolsProtocol):
    """One connection. On the event loop."""

    head_s = HEAD_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The client has so long for its first request."""
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        """A further request begins on the same connection."""
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._forget()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more to wait for."""
        self._forget()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abort()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

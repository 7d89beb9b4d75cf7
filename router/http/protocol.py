"""uvicorn's protocol, with more care for clients, and against them.

uvicorn limits how long a connection may be idle between requests, and not how long a request may take to begin, nor how
large its head may be, nor how long the rest of a body may take that was answered before its end: clients that send a
line a minute would hold as many connections as they like, and one line of a hundred megabytes, which is copied for each
piece of it that comes, the event loop. Nor how long a client may read nothing of its answer, which keeps a worker busy.
What a body may take that is waited for is `guard`'s matter.

A client of HTTP/1.0 knows no chunks, in which uvicorn sends what has no length: it gets the bytes, up to the end of the
connection.

Java's HTTP client asks to upgrade to HTTP/2 in each request. The parser takes what follows the head for the other
protocol, so that the body is lost; so a head that asks is read again without the question, which a server may ignore.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixfleet.errors import InvalidRequest
from router.http.errors import error_answer

HEAD_S = 15.0
"""From the connection, or from the first byte of a further request, to the end of the headers."""
REST_S = 60.0
"""For the rest of a body whose answer was given before its end, and the next head."""
STALL_S = 120.0
"""In which a client must read some 48 KiB when its answer fills all buffers on the way."""
MAX_HEAD_BYTES = 64 * 1024


class _AnyLength(int):
    """A length of an answer that is never too long, nor too short."""

    def __lt__(self, _: object) -> bool:
        return False

    def __ne__(self, _: object) -> bool:
        return False

    def __sub__(self, _: object) -> _AnyLength:
        return self

    __hash__ = int.__hash__


class CarefulProtocol(HttpToolsProtocol):
    """One connection. On the event loop."""

    head_s = HEAD_S
    rest_s = REST_S
    stall_s = STALL_S
    _deadline: asyncio.TimerHandle | None = None
    """Ends the wait for a request's head."""
    _rest: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Of the head that is awaited; what came together with the end of the request before it is not counted."""

    def connection_made(self, transport: Any) -> None:
        """The client has so long for its first request."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """More of a head, or of a body."""
        awaited = self._deadline
        try:
            self._read(data)
        except httptools.HttpParserError as error:
            message = f"this is no HTTP request: {error}"
            self.logger.warning(message)
            self.send_400_response(message)
        if awaited is None or self._deadline is not awaited or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the head of the request has more than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """OpenAI's error object. Where it would come in the midst of an answer, or pass for the answer to a request
        before it, the end.
        """
        cycle = self.cycle
        is_next = cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started)
        if not is_next or self.pipeline:
            self.transport.abort()
            return
        body = msgspec.json.encode(error_answer(InvalidRequest(msg)))
        head = [b"HTTP/1.1 400 Bad Request", b"content-type: application/json", b"connection: close"]
        self.transport.write(b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body]))
        self.transport.close()

    def on_message_begin(self) -> None:
        """A further request begins on the same connection."""
        self._unset_keepalive_if_required()
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self.parser.should_upgrade():
            return
        self._forget()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()

    def on_message_complete(self) -> None:
        """The body is whole; where it was answered before, the connection is idle from now on."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self._rest is not None:
            self._forget()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """An answer is out; where the rest of its request is still to come, or the next has begun, nothing is idle."""
        super().on_response_complete()
        has_rest = self.cycle.response_complete and self.cycle.more_body
        if has_rest or self._deadline is not None:
            self._unset_keepalive_if_required()
        if has_rest:
            self._rest = self.loop.call_later(self.rest_s, self._give_up)

    def pause_writing(self) -> None:
        """The client does not read as fast as its answer comes."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.stall_s, self._give_up)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._end_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more to wait for. uvicorn itself keeps a connection that was reset until it would have been idle."""
        self._forget()
        self._end_stall()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _read(self, data: bytes) -> None:
        """Raises HttpParserError."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as asked:
                rest = rest[asked.args[0] :]
                self._read_again()
            else:
                return

    def _read_again(self) -> None:
        """The head that is whole, without the question for another protocol. Raises HttpParserError."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":  # asks by its name
            raise httptools.HttpParserError("not a proxy")
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)  # the old one reads nothing behind `Connection: close`
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _forget(self) -> None:
        for timer in (self._deadline, self._rest):
            if timer is not None:
                timer.cancel()
        self._deadline = self._rest = None

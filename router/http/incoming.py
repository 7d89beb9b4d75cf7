"""Bodies on their way: a client may not take for ever, nor all clients together keep more than there is room for."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from radixfleet.errors import Unavailable
from radixfleet.settings import format_bytes
from router.http.errors import TooSlow

PAUSE_S = 20.0
TOTAL_S = 300.0
"""How long a client may be silent within a body, and take for all of it: else it holds a connection for nothing."""
SMALL_BYTES = 1024**2
"""So much of each body comes in whatever else does: a few large ones that are never whole hold up no others."""
_RETRY_AFTER_S = 1.0


class Room:
    """For what is beyond the first `SMALL_BYTES` of all bodies that are not whole. On the event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0


class IncomingBody:
    """`receive` of one request, which raises TooSlow or Unavailable until the body is whole; then it waits for the
    client to leave for as long as that takes. `close` it.
    """

    def __init__(self, receive: Receive, room: Room) -> None:
        self._receive = receive
        self._room = room
        self._bytes = 0
        self._is_whole = False
        self._ends_at_s = asyncio.get_running_loop().time() + TOTAL_S

    async def __call__(self) -> Message:
        """The next message."""
        if self._is_whole:
            return await self._receive()
        left_s = min(PAUSE_S, self._ends_at_s - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow("the body of the request did not come in time") from None
        if message["type"] != "http.request" or not message.get("more_body", False):
            self.close()
        else:
            self._take(len(message.get("body", b"")))
        return message

    def close(self) -> None:
        """The body is whole, or nobody waits for it any more."""
        self._is_whole = True
        self._room.used_bytes -= self._large(self._bytes)
        self._bytes = 0

    def _take(self, num_bytes: int) -> None:
        more = self._large(self._bytes + num_bytes) - self._large(self._bytes)
        if self._room.used_bytes + more > self._room.max_bytes:
            raise Unavailable(
                f"{format_bytes(self._room.max_bytes)} of large requests are on their way: there is no room for more",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._room.used_bytes += more
        self._bytes += num_bytes

    def _large(self, num_bytes: int) -> int:
        return max(0, num_bytes - SMALL_BYTES)

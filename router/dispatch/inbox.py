"""What a worker sent for one request over a link, until the request's client reads it.

Tokens that wait, because their client or the router itself is behind, are joined into one reply.
"""

from __future__ import annotations

import asyncio
from collections import deque

from router.dispatch.link import LinkFailure, Reply, joined


class Inbox:
    """What came for one request and was not read yet."""

    __slots__ = ("_items", "_loop", "_reader")

    def __init__(self) -> None:
        self._items: deque[Reply | LinkFailure] = deque()
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        """What the reader awaits; None while no reader waits."""

    def put(self, item: Reply | LinkFailure) -> None:
        """Let the reader have it."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> tuple[Reply | LinkFailure, int]:
        """What comes next, and how many messages of the worker are in it."""
        items = self._items
        while not items:
            self._reader = self._loop.create_future()
            await self._reader
        first, count = items.popleft(), 1
        if isinstance(first, Reply):
            while items and isinstance(second := items[0], Reply) and joined(first, second):
                items.popleft()
                count += 1
        return first, count

"""Notices that a stream has fallen silent, and not that this process was stopped for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

_PARTS = 4


class Silence:
    """How long one stream has been silent, while `limited_silence` holds."""

    def __init__(self, timeout_s: float, timeout: asyncio.Timeout) -> None:
        self._part_s = timeout_s / _PARTS
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._is_waiting = False
        self._silent_parts = 0
        self._begin_part()

    async def next(self, stream: AsyncIterator[T]) -> T | None:
        """The stream's next item; None when it has ended."""
        self._is_waiting = True
        try:
            return await anext(stream, None)
        finally:
            self._is_waiting = False
            self._silent_parts = 0

    def close(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _begin_part(self) -> None:
        self._timer = self._loop.call_later(self._part_s, self._end_part)

    def _end_part(self) -> None:
        self._silent_parts += self._is_waiting
        if self._silent_parts > _PARTS:
            self._timeout.reschedule(self._loop.time())
        else:
            self._begin_part()


@asynccontextmanager
async def limited_silence(timeout_s: float) -> AsyncIterator[Silence]:
    """Raises TimeoutError in `Silence.next` when nothing came for `timeout_s`, or up to a quarter longer.

    The time is counted in parts, each begun when the last has passed here. So of a time in which this process did not
    run (stopped, or its machine suspended) one part counts, and what came meanwhile is read before the next.
    """
    async with asyncio.timeout(None) as timeout:
        silence = Silence(timeout_s, timeout)
        try:
            yield silence
        finally:
            silence.close()

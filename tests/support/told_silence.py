"""Workers that are silent when a test says so, in place of after a time: none is silent for want of a core to run on.

monkeypatch.setattr("router.workers.connection.limited_silence", silence.limited)
...
silence.falls(address)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.workers.silence import Silence, limited_silence

_NEVER_S = 86_400.0


class ToldSilence:
    """Of all workers of the routers in this process."""

    def __init__(self) -> None:
        self._followed: dict[str, asyncio.Timeout] = {}

    def falls(self, address: str) -> None:
        """The worker that the router knows by this address has said nothing for as long as it may."""
        self._followed[address].reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def limited(self, _: float) -> AsyncIterator[Silence]:
        """In the place of `limited_silence`, in the task that follows a worker."""
        task = asyncio.current_task()
        assert task is not None
        address = task.get_name().removeprefix("follow ")
        async with asyncio.timeout(None) as timeout, limited_silence(_NEVER_S) as silence:
            self._followed[address] = timeout
            yield silence

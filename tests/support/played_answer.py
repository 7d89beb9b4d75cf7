"""An answer that a test plays, as the worker's end of a link takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from radixfleet.v1 import inference_pb2


class PlayedAnswer:
    """Says what it is told to say. See `worker.servicer.link.Answer`."""

    def __init__(self) -> None:
        self.waiting: deque[inference_pb2.GenerateResponse | Exception] = deque()
        """Said, and not taken."""
        self.error: Exception | None = None
        self._ended = False
        self._taken = asyncio.Event()
        self._listener: Callable[[], None] | None = None

    @property
    def is_over(self) -> bool:
        """All was taken, and nothing more comes."""
        return self._ended and not self.waiting

    @property
    def has_message(self) -> bool:
        """There is something to take."""
        return bool(self.waiting)

    def listen(self, listener: Callable[[], None]) -> None:
        """Have it called with news."""
        self._listener = listener
        listener()

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """The next message. Raises, with half of one made, what it was told to say of that kind."""
        said = self.waiting.popleft()
        self._taken.set()
        if isinstance(said, Exception):
            response.delta.text = "half"
            raise said
        response.CopyFrom(said)

    def say(self, response: inference_pb2.GenerateResponse | Exception) -> None:
        """One more message."""
        self.waiting.append(response)
        self._tell()

    def end(self, error: Exception | None = None) -> None:
        """Nothing more."""
        self.error, self._ended = error, True
        self._tell()

    async def play(self, responses: AsyncGenerator[inference_pb2.GenerateResponse, None]) -> None:
        """Say all of them, each when the one before was taken, and end."""
        try:
            async with aclosing(responses):
                async for response in responses:
                    self._taken.clear()
                    self.say(response)
                    await self._taken.wait()
        except Exception as error:  # noqa: BLE001  told to the link
            self.end(error)
        else:
            self.end()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener()


@asynccontextmanager
async def played(responses: AsyncGenerator[inference_pb2.GenerateResponse, None]) -> AsyncIterator[PlayedAnswer]:
    """The answer that a generator makes; leaving the block ends the generator."""
    answer = PlayedAnswer()
    playing = asyncio.create_task(answer.play(responses))
    try:
        yield answer
    finally:
        playing.cancel()
        await asyncio.wait([playing])

"""Coalesces what is to be written to a stream: while one message is being written, the next collects all that comes.

gRPC breaks a stream on which a message is larger than the limit, and everything else on that stream is lost with it. So
a message collects at most MESSAGE_BYTES; a single item that is larger gets a message of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)

MESSAGE_BYTES = 512 * 1024
"""Half of the smallest limit that can be set (`--max-message-bytes`), which leaves room for what encloses the items."""


class Outgoing(Generic[MessageT]):
    """The messages of one stream that are not written yet. Whoever adds an item wakes the stream's writer."""

    def __init__(self, make: Callable[[], MessageT]) -> None:
        """`make` returns an empty message."""
        self._make = make
        self._full: list[MessageT] = []
        self._num_bytes = 0
        self.last = make()
        """The message that collects now. Small items, such as cancels, are added to it without asking for room."""

    def with_room_for(self, num_bytes: int) -> MessageT:
        """The message to which the caller must now add an item of `num_bytes`."""
        if self._num_bytes and self._num_bytes + num_bytes > MESSAGE_BYTES:
            self._full.append(self.last)
            self.last, self._num_bytes = self._make(), 0
        self._num_bytes += num_bytes
        return self.last

    def take(self) -> list[MessageT]:
        """Take all messages out, in order. The last may be empty."""
        messages = [*self._full, self.last]
        self._full, self._num_bytes = [], 0
        self.last = self._make()
        return messages

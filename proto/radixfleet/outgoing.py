"""What waits to be written to a stream: messages, each with all that came while the one before was on its way.

gRPC ends a stream with a message that is larger than it allows, and all that goes on there with it. So a message takes
in no more than MESSAGE_BYTES, but for one thing that is larger, which goes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)

MESSAGE_BYTES = 512 * 1024
"""Half of the smallest limit that can be set (`--max-message-bytes`): what is around the things fits in, too."""


class Outgoing(Generic[MessageT]):
    """Of one stream. Whoever adds to it wakes the writer."""

    def __init__(self, make: Callable[[], MessageT]) -> None:
        """`make`: an empty message."""
        self._make = make
        self._full: list[MessageT] = []
        self._num_bytes = 0
        self.last = make()
        """For what is small."""

    def with_room_for(self, num_bytes: int) -> MessageT:
        """The message to which a thing of this size is to be added, at once."""
        if self._num_bytes and self._num_bytes + num_bytes > MESSAGE_BYTES:
            self._full.append(self.last)
            self.last, self._num_bytes = self._make(), 0
        self._num_bytes += num_bytes
        return self.last

    def take(self) -> list[MessageT]:
        """All messages, in order, the last one perhaps empty."""
        messages = [*self._full, self.last]
        self._full, self._num_bytes = [], 0
        self.last = self._make()
        return messages

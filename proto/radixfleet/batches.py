"""Messages packed into larger ones of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)


def batches(messages: Sequence[MessageT], most_bytes: int) -> Iterator[Sequence[MessageT]]:
    """All of `messages` in order, in runs of at most `most_bytes` each; one that is larger goes alone."""
    if len(messages) == 1:
        yield messages
        return
    begin, size = 0, 0
    for index, message in enumerate(messages):
        message_bytes = message.ByteSize()
        if size and size + message_bytes > most_bytes:
            yield messages[begin:index]
            begin, size = index, 0
        size += message_bytes
    if messages:
        yield messages[begin:]

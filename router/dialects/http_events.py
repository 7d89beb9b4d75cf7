"""What an engine says over OpenAI's HTTP, read: server-sent events, and the JSON in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import msgspec

from router.dialects.speaker import Unreachable

_MAX_EVENT_BYTES = 8 * 1024**2
_MAX_MESSAGE = 500
DONE = b"[DONE]"


class FunctionPiece(msgspec.Struct):
    """Part of a call of a tool."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(msgspec.Struct):
    """Pieces with one index belong to one call."""

    index: int = 0
    function: FunctionPiece | None = None


class MessagePiece(msgspec.Struct):
    """Of a chat: what is new, or the whole of it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another engine's name for the same."""
    tool_calls: list[ToolCallPiece] | None = None


class ChoicePiece(msgspec.Struct):
    """Of one completion."""

    index: int = 0
    text: str | None = None
    delta: MessagePiece | None = None
    message: MessagePiece | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None
    stop_reason: int | str | None = None
    """What matched: vLLM's name for it,"""
    matched_stop: int | str | None = None
    """and SGLang's."""


class CachedTokens(msgspec.Struct):
    """Of a prompt."""

    cached_tokens: int | None = None


class UsageTold(msgspec.Struct):
    """Tokens of the request so far."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class TimingsTold(msgspec.Struct):
    """What llama.cpp tells beside the usage, or instead of it."""

    cache_n: int | None = None
    prompt_n: int = 0
    predicted_n: int | None = None


class Event(msgspec.Struct):
    """One event of a stream, or a whole answer."""

    choices: list[ChoicePiece] = []
    usage: UsageTold | None = None
    timings: TimingsTold | None = None
    error: Any = None
    object: str | None = None
    message: Any = None
    """Of an error, in the form of engines that write no `error` around it."""


_DECODER = msgspec.json.Decoder(Event)


def read_event(data: bytes) -> Event:
    """Raises Unreachable for what is no such event: an engine that writes it is broken."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreachable(f"it sent what is no event of OpenAI's API ({error}): {data[:80]!r}") from error


def error_message(body: bytes, otherwise: str) -> str:
    """What an engine says is wrong, whichever of the common forms it has."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        told = body.decode(errors="replace").strip()
    for key in ("error", "message", "detail"):
        while isinstance(told, dict) and told.get(key):
            told = told[key]
    if isinstance(told, str):
        return told[:_MAX_MESSAGE] or otherwise
    return msgspec.json.encode(told).decode()[:_MAX_MESSAGE] if told else otherwise


async def server_sent_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each event. Raises Unreachable for one that is too long to be one."""
    buffer = bytearray()
    data: list[bytes] = []
    async for chunk in chunks:
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end]).rstrip(b"\r")
            del buffer[: end + 1]
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data.clear()
        if len(buffer) > _MAX_EVENT_BYTES:
            raise Unreachable(f"it sent an event of more than {_MAX_EVENT_BYTES} bytes")
    if data:
        yield b"\n".join(data)

"""What an engine says over OpenAI's HTTP, read: server-sent events, and the JSON in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, TypeAlias

import msgspec

from router.dialects.speaker import Faulty

_MAX_EVENT_BYTES = 8 * 1024**2
_MAX_COUNT = 2**31 - 1
_MAX_MESSAGE = 500
_CLIENTS_FAULT = ("invalid_request_error", "BadRequestError")
DONE = b"[DONE]"

Number: TypeAlias = int | float | None
"""An engine's count, of which nothing is certain: see `count_told`. An answer does not fail for a wrong one."""


class FunctionPiece(msgspec.Struct):
    """Part of a call of a tool."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(msgspec.Struct):
    """Pieces with one index belong to one call, unless their ids say otherwise."""

    index: int | None = None
    id: str | None = None
    """Mostly in the first piece of a call alone."""
    function: FunctionPiece | None = None


class MessagePiece(msgspec.Struct):
    """A chat's message: what is new in it, or the whole of it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another engine's name for the same."""
    tool_calls: list[ToolCallPiece] | None = None


class ChoicePiece(msgspec.Struct):
    """What an event or an answer has of one completion."""

    index: int = 0
    text: str | None = None
    delta: MessagePiece | None = None
    message: MessagePiece | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None
    stop_reason: Any = None
    """What matched, a text or a token: vLLM's name for it,"""
    matched_stop: Any = None
    """and SGLang's."""


class CachedTokens(msgspec.Struct):
    """The part of a usage that says how much of the prompt was cached."""

    cached_tokens: Number = None


class UsageTold(msgspec.Struct):
    """Tokens of the request so far."""

    prompt_tokens: Number = None
    completion_tokens: Number = None
    prompt_tokens_details: CachedTokens | None = None


class TimingsTold(msgspec.Struct):
    """What llama.cpp tells beside the usage, or instead of it."""

    cache_n: Number = None
    prompt_n: Number = None
    predicted_n: Number = None


class Event(msgspec.Struct):
    """One event of a stream, or a whole answer."""

    choices: list[ChoicePiece] | None = None
    usage: UsageTold | None = None
    timings: TimingsTold | None = None
    error: Any = None
    object: str | None = None
    message: Any = None
    """The text of an error, from engines that write no `error` around it."""
    code: Any = None
    """The status of such an error."""
    type: Any = None
    """The kind of the error."""


_DECODER = msgspec.json.Decoder(Event)


def read_event(data: bytes) -> Event:
    """Raises Faulty for what is no such event: an engine that writes it is broken."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Faulty(f"it sent what is no event of OpenAI's API ({error}): {data[:80]!r}") from error


def count_told(number: Number) -> int | None:
    """A number of tokens; None for none, and for what can be no such number."""
    return int(number) if number is not None and 0 <= number <= _MAX_COUNT else None


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


def error_status(code: Any, kind: Any) -> int | None:
    """The HTTP status that an error within an answer stands for; None: it does not say."""
    if isinstance(code, int):
        return code
    if isinstance(code, str) and code.isdecimal():
        return int(code[:4])
    return 400 if kind in _CLIENTS_FAULT else None


async def server_sent_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each event. Raises Faulty for one that is too long to be one."""
    buffer = bytearray()
    data: list[bytes] = []
    size = 0
    async for chunk in chunks:
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end]).rstrip(b"\r")
            del buffer[: end + 1]
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
                size += len(line)
            elif not line and data:
                yield b"\n".join(data)
                data.clear()
                size = 0
        if size + len(buffer) > _MAX_EVENT_BYTES:
            raise Faulty(f"it sent an event of more than {_MAX_EVENT_BYTES} bytes")
    if data:
        yield b"\n".join(data)

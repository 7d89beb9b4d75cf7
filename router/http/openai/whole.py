"""Answers that are not streamed: the same pieces, put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from router.http.openai.answers import Part
from router.http.openai.logprobs import joined_completion
from router.http.openai.shapes import (
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatPart,
    CompletionAnswer,
    CompletionPart,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
    Usage,
)


class Whole(Protocol):
    """An answer in the making."""

    def add(self, part: Part) -> None:
        """The next piece of one of its choices."""
        ...

    def answer(self, answer_id: str, now: int, model: str, usage: Usage) -> msgspec.Struct:
        """All of it. `now`: in Unix time."""
        ...


class WholeChat:
    """Of a chat."""

    def __init__(self) -> None:
        self._parts: dict[int, list[ChatPart]] = {}

    def add(self, part: Part) -> None:
        """See `Whole`."""
        assert isinstance(part, ChatPart), "made by ChatChoices"
        self._parts.setdefault(part.index, []).append(part)

    def answer(self, answer_id: str, now: int, model: str, usage: Usage) -> ChatAnswer:
        """See `Whole`."""
        return ChatAnswer(answer_id, now, model, [_chat_choice(self._parts[n]) for n in sorted(self._parts)], usage)


class WholeCompletion:
    """Of completions."""

    def __init__(self) -> None:
        self._parts: dict[int, list[CompletionPart]] = {}

    def add(self, part: Part) -> None:
        """See `Whole`."""
        assert isinstance(part, CompletionPart), "made by CompletionChoices"
        self._parts.setdefault(part.index, []).append(part)

    def answer(self, answer_id: str, now: int, model: str, usage: Usage) -> CompletionAnswer:
        """See `Whole`."""
        choices = [_completion_choice(self._parts[n]) for n in sorted(self._parts)]
        return CompletionAnswer(answer_id, now, model, choices, usage)


def _chat_choice(parts: Sequence[ChatPart]) -> ChatChoice:
    text = "".join(part.delta.content for part in parts if isinstance(part.delta.content, str))
    calls = _calls(parts)
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    message = ChatMessage(text or None) if calls else ChatMessage(text)
    if calls:
        message.tool_calls = calls
    reason = parts[-1].finish_reason
    assert reason is not None, "the last piece says how it ended"
    return ChatChoice(parts[0].index, message, reason, _joined_chat(logprobs) if logprobs else None)


def _calls(parts: Iterable[ChatPart]) -> list[ToolCall]:
    deltas: dict[int, list[ToolCallDelta]] = {}
    for part in parts:
        for delta in part.delta.tool_calls or ():
            deltas.setdefault(delta.index, []).append(delta)
    return [_joined_call(deltas[index]) for index in sorted(deltas)]


def _joined_call(deltas: Sequence[ToolCallDelta]) -> ToolCall:
    first = deltas[0]
    assert isinstance(first.id, str), "the first piece of a call has its id"
    assert isinstance(first.function.name, str), "and its name"
    return ToolCall(first.id, FunctionCall(first.function.name, "".join(delta.function.arguments for delta in deltas)))


def _joined_chat(pieces: Iterable[ChatLogprobs]) -> ChatLogprobs:
    return ChatLogprobs([token for piece in pieces for token in piece.content])


def _completion_choice(parts: Sequence[CompletionPart]) -> CompletionPart:
    whole = CompletionPart(parts[0].index, "".join(part.text for part in parts), finish_reason=parts[-1].finish_reason)
    whole.logprobs = joined_completion([part.logprobs for part in parts if part.logprobs is not None])
    return whole

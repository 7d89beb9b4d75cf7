"""Calls of tools, taken out of the text of an answer.

Models of the Hermes and Qwen families write a call as

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

with text before, between and behind. The text goes on as it comes; what might be the beginning of a mark is held back
until it is clear. White space alone between calls, and behind the last, is part of the notation and left out, so it is
held back as well. What stands between marks and is no call is text after all, marks included.
"""

from __future__ import annotations

import secrets
from typing import Any, TypeAlias

import msgspec

from router.http.openai.responses import FunctionCall, ToolCall

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"

Found: TypeAlias = str | ToolCall
"""Text for the client, or a call."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}
    parameters: dict[str, Any] | None = None


class ToolCallFinder:
    """Reads the text of one answer, in pieces."""

    def __init__(self) -> None:
        self._held = ""
        """Behind an opening mark all since it, else what may be the beginning of one or the notation between calls."""
        self._is_inside = False
        self._is_after_call = False
        """Since the last call nothing but white space has come."""
        self.num_calls = 0

    def push(self, text: str) -> list[Found]:
        """What is certain now."""
        self._held += text
        found: list[Found] = []
        while (item := self._next()) is not None:
            if item:
                found.append(item)
        return found

    def finish(self) -> list[Found]:
        """What is left when the answer has ended; a call may lack its closing mark."""
        if not self._held:
            return []
        held, self._held = self._held, ""
        if self._is_inside:
            return [self._call(held, held.removeprefix(_OPEN))]
        return [] if self._is_notation(held) else [held]

    def _next(self) -> Found | None:
        """Take the next certain item off what is held, perhaps an empty text; None: more text is needed."""
        if self._is_inside:
            inside, mark, rest = self._held.removeprefix(_OPEN).partition(_CLOSE)
            if not mark:
                return None
            item = self._call(f"{_OPEN}{inside}{_CLOSE}", inside)
            self._is_inside, self._held, self._is_after_call = False, rest, isinstance(item, ToolCall)
            return item
        text, mark, rest = self._held.partition(_OPEN)
        if mark:
            self._is_inside, self._held = True, _OPEN + rest
            return "" if self._is_notation(text) else text
        certain = text[: len(text) - _beginning(text)]
        if not certain or self._is_notation(certain):
            return None
        self._held, self._is_after_call = text[len(certain) :], False
        return certain

    def _is_notation(self, text: str) -> bool:
        return self._is_after_call and not text.strip()

    def _call(self, whole: str, inside: str) -> Found:
        try:
            call = msgspec.json.decode(inside.strip(), type=_Call)
        except (msgspec.DecodeError, RecursionError):
            return whole
        arguments = call.arguments if call.parameters is None else call.parameters
        self.num_calls += 1
        return ToolCall(
            id=f"call_{secrets.token_hex(12)}",
            function=FunctionCall(call.name, msgspec.json.encode(arguments).decode()),
            index=self.num_calls - 1,
        )


def _beginning(text: str) -> int:
    """Length of the longest end of `text` that begins an opening mark."""
    longest = min(len(text), len(_OPEN) - 1)
    return next((length for length in range(longest, 0, -1) if _OPEN.startswith(text[-length:])), 0)

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
from typing import TypeAlias

import msgspec

from router.http.openai.shapes import FunctionCall, ToolCall

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

Found: TypeAlias = str | ToolCall
"""Text for the client, or a call."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, msgspec.Raw] = {}
    parameters: dict[str, msgspec.Raw] | None = None


class ToolCallFinder:
    """Reads the text of one answer, in pieces; in time that grows with the text, however long a call is."""

    def __init__(self) -> None:
        self._held = ""
        """Outside of calls, what may be the beginning of an opening mark or the notation between calls."""
        self._inside: list[str] | None = None
        """The pieces since an opening mark; None: outside."""
        self._is_after_call = False
        """Since the last call nothing but white space has come."""
        self.num_calls = 0

    def push(self, text: str) -> list[Found]:
        """What is certain now."""
        found: list[Found] = []
        rest: str | None = text
        while rest is not None:
            rest = self._read_text(rest, found) if self._inside is None else self._read_call(rest, found, self._inside)
        return found

    def finish(self) -> list[Found]:
        """What is left when the answer has ended; a call may lack its closing mark."""
        if self._inside is not None:
            inside, self._inside = "".join(self._inside), None
            return [self._call(CALL_OPEN + inside, inside)]
        held, self._held = self._held, ""
        return [held] if held and not self._is_notation(held) else []

    def _read_text(self, text: str, found: list[Found]) -> str | None:
        """Outside of calls. Returns what comes behind an opening mark, and None where there is none."""
        text, mark, rest = (self._held + text).partition(CALL_OPEN)
        certain = text if mark else text[: len(text) - _beginning(text)]
        self._held = "" if mark else text
        if certain and not self._is_notation(certain):
            found.append(certain)
            self._held, self._is_after_call = self._held[len(certain) :], False
        if not mark:
            return None
        self._inside = []
        return rest

    def _read_call(self, text: str, found: list[Found], inside: list[str]) -> str | None:
        """The same between marks: what comes behind the closing one."""
        seam = "".join(inside[-len(CALL_CLOSE) :])[-len(CALL_CLOSE) + 1 :]  # pieces are not empty
        end = (seam + text).find(CALL_CLOSE) - len(seam)
        if end < -len(seam):
            inside += [text] if text else []
            return None
        whole = "".join(inside)
        call = whole + text[:end] if end >= 0 else whole[:end]
        item = self._call(f"{CALL_OPEN}{call}{CALL_CLOSE}", call)
        found.append(item)
        self._inside, self._is_after_call = None, isinstance(item, ToolCall)
        return text[end + len(CALL_CLOSE) :]

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
    longest = min(len(text), len(CALL_OPEN) - 1)
    return next((length for length in range(longest, 0, -1) if CALL_OPEN.startswith(text[-length:])), 0)

"""Calls of tools, taken out of the text of an answer.

Models of the Hermes and Qwen families write a call as

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

with text before, between and behind. The text goes on as it comes; what might be the beginning of a mark is held back
until it is clear. White space alone between calls, and behind the last, is part of the notation and left out, so it is
held back as well. What stands between marks and is no call is text after all, marks included.

A call that begins as above, with the name of a tool, is told as it comes: its name, and its arguments as the model
writes them, but for their last brace, which comes with the closing mark. So it cannot become text any more: arguments
that break off stay as they came, and what else stands before the closing mark is left out. Other calls come whole.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from router.http.openai.json_object import ObjectEnd, is_object
from router.http.openai.shapes import FunctionDelta, ToolCallDelta

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"

_HEAD = re.compile(r'\s*{\s*"name"\s*:\s*"([^"\\<]*)"\s*,\s*"arguments"\s*:\s*(?={)')
_MOST_HEAD = 1024
"""Characters in which a call must come to its arguments to be told as it comes."""

Found: TypeAlias = str | ToolCallDelta
"""Text for the client, or more of a call."""


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    parameters: msgspec.Raw = msgspec.Raw()


@dataclass(slots=True)
class _Begun:
    """A call that is told as it comes."""

    name: str
    index: int
    end: ObjectEnd = field(default_factory=ObjectEnd)
    has_ended: bool = False
    """Its arguments have, or have broken off."""
    told: list[str] = field(default_factory=list)
    """Of its arguments."""

    def tell(self, arguments: str, found: list[Found]) -> None:
        """More of them; with those that the same piece of text has brought."""
        last = found[-1] if found else None
        if not self.told:
            found.append(_first(self.index, self.name, arguments))
        elif isinstance(last, ToolCallDelta):
            last.function.arguments += arguments
        elif arguments:
            found.append(ToolCallDelta(self.index, FunctionDelta(arguments)))
        self.told.append(arguments)


class ToolCallFinder:
    """Reads the text of one answer, in pieces; in time that grows with the text, however long a call is."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools."""
        self._names = names
        self._held = ""
        """Outside of calls, what may be the beginning of an opening mark."""
        self._blank: list[str] = []
        """White space since the last call: notation, unless text comes behind it."""
        self._inside: list[str] | None = None
        """The pieces since an opening mark, or since what has been told of the call; None: outside."""
        self._beginning = ""
        """The first characters since the opening mark."""
        self._begun: _Begun | None = None
        self._is_after_call = False
        """Since the last call nothing but white space has come."""
        self._num_calls = 0
        self._num_broken = 0

    @property
    def has_whole_calls(self) -> bool:
        """Calls have come, and none that has ended broke off."""
        return self._num_calls > 0 and not self._num_broken

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
            inside = "".join(self._inside)
            found: list[Found] = []
            self._end(CALL_OPEN + inside, inside, found)
            return found
        held, self._held = self._held, ""
        return ["".join((*self._blank, held))] if held else []

    def _read_text(self, text: str, found: list[Found]) -> str | None:
        """Outside of calls. Returns what comes behind an opening mark, and None where there is none."""
        text, mark, rest = (self._held + text).partition(CALL_OPEN)
        certain = text if mark else text[: len(text) - _beginning(text)]
        self._held = text[len(certain) :]
        if self._is_after_call and not certain.strip():
            self._blank.append(certain)
        elif certain:
            found.append("".join((*self._blank, certain)))
            self._blank, self._is_after_call = [], False
        if not mark:
            return None
        self._inside, self._beginning, self._blank = [], "", []
        return rest

    def _read_call(self, text: str, found: list[Found], inside: list[str]) -> str | None:
        """The same between marks: what comes behind the closing one."""
        text = self._read_arguments(self._read_head(text, inside), found)
        seam = "".join(inside[-len(CALL_CLOSE) :])[-len(CALL_CLOSE) + 1 :]  # pieces are not empty
        end = (seam + text).find(CALL_CLOSE) - len(seam)
        if end < -len(seam):
            inside += [text] if text else []
            return None
        whole = "".join(inside)
        call = whole + text[:end] if end >= 0 else whole[:end]
        self._end(f"{CALL_OPEN}{call}{CALL_CLOSE}", call, found)
        return text[end + len(CALL_CLOSE) :]

    def _read_head(self, text: str, inside: list[str]) -> str:
        """What is left of the text: all of it, unless a call begins that is told as it comes."""
        num_before = len(self._beginning)
        if self._begun is not None or num_before == _MOST_HEAD:
            return text
        self._beginning += text[: _MOST_HEAD - num_before]
        head = _HEAD.match(self._beginning)
        if head is None or head[1] not in self._names:
            return text
        inside.clear()
        self._begun = _Begun(head[1], self._num_calls)
        self._num_calls += 1
        return text[head.end() - num_before :]

    def _read_arguments(self, text: str, found: list[Found]) -> str:
        """The same of arguments that are told. What is left when they end begins with their last brace."""
        call = self._begun
        if call is None or call.has_ended:
            return text
        end = call.end.find(text)
        call.has_ended = end >= 0
        arguments = text[:end].removesuffix("}") if call.has_ended else text
        call.tell(arguments, found)
        return text[len(arguments) :]

    def _end(self, whole: str, inside: str, found: list[Found]) -> None:
        """Of a call. `whole`: with its marks."""
        call, self._begun, self._inside = self._begun, None, None
        if call is None:
            found.append(self._whole_call(inside) or whole)
            self._is_after_call = not isinstance(found[-1], str)
            return
        call.tell("}" if inside.startswith("}") else "", found)
        self._num_broken += not is_object("".join(call.told))
        self._is_after_call = True

    def _whole_call(self, text: str) -> ToolCallDelta | None:
        """None: it is no call."""
        try:
            call = msgspec.json.decode(text.strip(), type=_Call)
        except (msgspec.DecodeError, RecursionError):
            return None
        arguments = bytes(call.parameters or call.arguments).decode()
        if not is_object(arguments):
            return None
        self._num_calls += 1
        return _first(self._num_calls - 1, call.name, arguments)


def _first(index: int, name: str, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(index, FunctionDelta(arguments, name), f"call_{secrets.token_hex(12)}", "function")


def _beginning(text: str) -> int:
    """Length of the longest end of `text` that begins an opening mark."""
    longest = min(len(text), len(CALL_OPEN) - 1)
    return next((length for length in range(longest, 0, -1) if CALL_OPEN.startswith(text[-length:])), 0)

"""Where a JSON object ends in a text that comes in pieces, and whether all of it is one."""

from __future__ import annotations

import re

import msgspec

_MARKS = re.compile('[{}<"]')
_MARKS_OF_STRINGS = re.compile(r'["\\]')


class ObjectEnd:
    """Looks for the end of an object; knows strings, escapes and depth alone, so what it has passed may be malformed.

    An object that comes to a `<` outside of its strings, where JSON has none, ends before it: it has been left off.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escape = False
        """A backslash was the last character of a string's."""

    def find(self, text: str) -> int:
        """Where it ends in the next piece, its brace included; -1: not there. The first piece begins with a brace."""
        at = 0
        while at < len(text):
            if self._is_escape:
                self._is_escape = False
                at += 1
                continue
            mark = (_MARKS_OF_STRINGS if self._is_string else _MARKS).search(text, at)
            if mark is None:
                return -1
            at = mark.end()
            match mark[0]:
                case "<":
                    return mark.start()
                case '"':
                    self._is_string = not self._is_string
                case "\\":
                    self._is_escape = True
                case brace:
                    self._depth += 1 if brace == "{" else -1
                    if not self._depth:
                        return at
        return -1


def is_object(text: str) -> bool:
    """Whether a text is an object's, whatever numbers it has."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True

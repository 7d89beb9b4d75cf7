"""Incremental detokenizing: each token gives the text it makes certain, and all of it joins to the whole decoding.

A token is not a piece of text: a character may lie across several tokens, and what a token looks like may depend on its
neighbours (a leading space, runs of byte tokens). So a small window of tokens is decoded each time:

    tokens   ... given out, forgotten ... | context        | pending
    text                                  | given out      | given out in part
             every token to the left      | [0, a)         | [a, n)   decoded together

- The first context is the end of the prompt: SentencePiece decoders drop the space of the very first word, and an
  answer would be glued to the text that it goes on. It is the last token, or the last few where a character lies
  across them.
- Text that ends without U+FFFD is certain; pending then becomes the new context, which so begins and ends between
  characters.
- Text that ends with U+FFFD may be a character not yet whole. An unfinished character is at most 3 bytes, which show as
  at most 3 U+FFFD, so the last 3 of a run are held back and nothing else is.
- A long run of bytes that are no UTF-8 would let the window grow. It is cut where decoding both sides apart gives the
  same text, which for byte-level vocabularies is so exactly between characters; so time stays linear in the output.

Byte-fallback decoders (SentencePiece vocabularies) turn a whole run of byte tokens into U+FFFD when any part of it is
not UTF-8, including characters that were whole before. Text given out is never taken back, so those characters stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Text of a token sequence: the tokenizer's whole-sequence decoding, with the request's options applied."""

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 4
"""No character lies across more."""

_UNFINISHED_BYTES = 3
_WINDOW_TOKENS = 16


class Detokenizer:
    """Text of one request's tokens."""

    def __init__(self, decode: Decode, invisible: frozenset[int] = frozenset(), *, context: Sequence[int] = ()) -> None:
        """`invisible`: tokens that give no text under the request's options (special). `context`: what the first token
        follows, of which the last `CONTEXT_TOKENS` are enough.
        """
        self._decode = decode
        self._invisible = invisible
        self._context: list[int] = []
        self._pending: list[int] = []
        self._given = ""
        """The part of the window's text that was returned already, or is the prompt's."""
        for num_tokens in range(1, min(len(context), CONTEXT_TOKENS) + 1):
            end = list(context[-num_tokens:])
            text = decode(end)
            if REPLACEMENT not in text:  # else it begins within a character, or the prompt ends within one
                self._context, self._given = end, text
                break

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is now certain, possibly empty."""
        if token_id in self._invisible:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        certain = _certain(text)
        if not text.startswith(self._given):  # a byte-fallback run: the context no longer helps
            self._context, self._given = [], ""
            text = self._decode(self._pending)
            certain = _certain(text)
        new = certain[len(self._given) :]
        if certain == text:
            self._move(new)
        else:
            self._given += new
            if len(self._pending) >= _WINDOW_TOKENS:
                new += self._cut(text)
        return new

    def finish(self) -> str:
        """The text still held back; an unfinished character shows as U+FFFD. Nothing may be pushed afterwards."""
        text = self._decode(self._context + self._pending)
        if not text.startswith(self._given):
            return self._decode(self._pending)
        return text[len(self._given) :]

    def _move(self, new: str) -> None:
        """All of the window's text is out: what is pending becomes the context, unless it has no text to be one."""
        if new:
            self._context, self._pending = self._pending, []
            self._given = self._decode(self._context)
        elif self._context:
            self._pending = []

    def _cut(self, text: str) -> str:
        """Forget the window's older tokens where that changes nothing later; returns text that this makes certain."""
        window = self._context + self._pending
        for tail_tokens in range(1, _UNFINISHED_BYTES + 1):
            head, tail = self._decode(window[:-tail_tokens]), self._decode(window[-tail_tokens:])
            if tail and head + tail == text:
                new = head[len(self._given) :]
                self._context, self._pending = [], window[-tail_tokens:]
                self._given = self._given[len(head) :]
                return new
        return ""


def _certain(text: str) -> str:
    """`text` without the end that a further byte could change."""
    whole = len(text.rstrip(REPLACEMENT))
    return text[: max(whole, len(text) - _UNFINISHED_BYTES)]

"""Cutting a text where a tokenizer cuts it itself, so that each piece is tokenized once and remembered.

Tokenizing costs far more than choosing a worker, and prompts repeat: a system prompt, the earlier turns of a chat. A
tokenizer first searches the raw text for its added tokens (leftmost, longest) and then treats what lies between them
apart: normalizer, pre-tokenizer and model see one stretch at a time. So a text may be cut before such a token:

    You are kind.<|end|><|user|>Hi!<|end|><|assistant|>
    [0 ..........)[.....)[.........)[.....)[..........)     ids(text) = ids of the pieces, joined

Each piece keeps the token it begins with: some pre-tokenizers treat the very start of a text specially (Metaspace with
prepend_scheme "first" adds a space there alone), and only the first piece may look like one.

Where cutting would change ids, it is not done:
- before a token matched in the normalized text: it is not where the raw text shows it;
- before a token with `lstrip` (it takes the spaces to its left) or `single_word` (it looks at its left neighbour);
- before a token that begins with a letter, a digit, "_" or a space: a token to the left that is `single_word` or
  `rstrip` looks at it;
- anywhere, when the model draws lots (BPE dropout).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections import OrderedDict

from radixfleet.types import TokenArray

_ENTRY_BYTES = 300
"""Rough overhead of an entry: key and array objects, the map's links."""
_MAX_ENTRY_SHARE = 8


class SegmentCutter:
    """Cuts texts for one tokenizer. Immutable."""

    def __init__(self, tokenizer_json: str) -> None:
        """`tokenizer_json`: the text of a tokenizer.json."""
        config = json.loads(tokenizer_json)
        tokens = [token for token in config.get("added_tokens") or [] if token["content"] and not token["normalized"]]
        random_model = bool((config.get("model") or {}).get("dropout"))
        self._cuttable = frozenset(token["content"] for token in tokens if not random_model and _is_cuttable(token))
        # Tokens that may not be cut at are searched too: they can cover the place where another seems to begin.
        contents = sorted({token["content"] for token in tokens})
        self._pattern = re.compile(_longest_of(contents)) if self._cuttable else None

    def cut(self, text: str) -> list[str]:
        """The pieces of `text`, in order; the whole text as one where it cannot be cut."""
        if self._pattern is None:
            return [text]
        starts = [match.start() for match in self._pattern.finditer(text) if match.group() in self._cuttable]
        bounds = [0, *(start for start in starts if start > 0), len(text)]
        return [text[start:end] for start, end in itertools.pairwise(bounds)]


def _longest_of(words: list[str]) -> str:
    """A pattern that matches the longest of `words` (sorted, different) at a place.

    Common beginnings are written once, as in a tree: a vocabulary has hundreds of added tokens that begin alike, and
    trying each of them at every "<" of a text would cost more than the cache saves.
    """
    prefix = os.path.commonprefix(words)  # noqa: RUF071  characters are what is wanted
    rests = [word[len(prefix) :] for word in words]
    groups = itertools.groupby((rest for rest in rests if rest), key=lambda rest: rest[0])
    branches = "|".join(_longest_of(list(group)) for _, group in groups)
    if not branches:
        return re.escape(prefix)
    return f"{re.escape(prefix)}(?:{branches}){'?' if '' in rests else ''}"


def _is_cuttable(token: dict[str, object]) -> bool:
    first = str(token["content"])[0]
    looked_at = first.isalnum() or first == "_" or first.isspace()
    return not (token["lstrip"] or token["single_word"] or looked_at)


class SegmentCache:
    """Token ids of pieces of text, least recently used out first, bounded in bytes. Safe to use from many threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, TokenArray] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, segment: str) -> TokenArray | None:
        """The ids of a piece seen before."""
        with self._lock:
            ids = self._entries.get(segment)
            if ids is None:
                self.misses += 1
            else:
                self.hits += 1
                self._entries.move_to_end(segment)
            return ids

    def put(self, segment: str, ids: TokenArray) -> None:
        """Remember a piece, unless it would push out too much of the rest."""
        size = _entry_bytes(segment, ids)
        if size * _MAX_ENTRY_SHARE > self._max_bytes:
            return
        with self._lock:
            if segment in self._entries:
                return
            self._entries[segment] = ids
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _entry_bytes(*self._entries.popitem(last=False))


def _entry_bytes(segment: str, ids: TokenArray) -> int:
    return segment.__sizeof__() + ids.nbytes + _ENTRY_BYTES

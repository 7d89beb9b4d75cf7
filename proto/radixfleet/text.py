"""Text to token ids and back, the same on router and worker: made from a `TokenizerSpec`, which travels between them.

All methods are safe from many threads and meant for a thread pool: tokenizing takes about 1.4 us a token. The batch
calls of the tokenizers library are used even for one text, because they alone release the interpreter's lock: the
others stop the event loop for as long as they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import tokenizers
import xxhash

from radixfleet.chat_template import ChatTemplate
from radixfleet.errors import InvalidRequest
from radixfleet.segments import SegmentCache, SegmentCutter
from radixfleet.types import ChatPrompt, PromptForm, TokenArray

SEGMENT_CACHE_BYTES = 64 * 1024**2

_FEW_TOKENS = 32
"""So many are decoded by the plain call: it takes microseconds, half of what the batch call does for the next token."""


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """All that text and ids depend on. Travels as JSON (`Worker.GetTokenizer`): a router needs no copy of the model."""

    tokenizer_json: str
    """The text of a tokenizer.json of the tokenizers library."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a generation."""
    add_bos: bool
    """A plain text begins with bos_token_id."""
    vocab_size: int
    """Ids are below this; may exceed the tokenizer's own count where the model's table is padded."""

    def to_json(self) -> bytes:
        """One JSON object with the fields above."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> TokenizerSpec:
        """The spec that `to_json` wrote. Raises ValueError for anything else."""
        return msgspec.json.decode(data, type=TokenizerSpec)

    def fingerprint(self) -> int:
        """xxh3-64 of all fields: equal fingerprints tokenize equally."""
        return xxhash.xxh3_64_intdigest(self.to_json())


class Tokenizer:
    """Encodes and decodes as one `TokenizerSpec` says."""

    def __init__(self, spec: TokenizerSpec, *, cache_bytes: int = SEGMENT_CACHE_BYTES) -> None:
        """`cache_bytes`: bound of the segment cache; 0 turns it off. Raises ValueError when tokenizer_json is none."""
        self.spec = spec
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"the tokenizer cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cutter = SegmentCutter(spec.tokenizer_json) if cache_bytes else None
        self.cache = SegmentCache(cache_bytes)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._template: ChatTemplate | InvalidRequest
        if spec.chat_template is None:
            self._template = InvalidRequest(
                "this model has no chat template; send text or token ids", field="prompt.chat"
            )
        else:
            try:
                self._template = ChatTemplate(
                    spec.chat_template, bos_token=spec.bos_token or "", eos_token=spec.eos_token or ""
                )
            except InvalidRequest as error:
                self._template = error

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation."""
        return self.spec.eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self.spec.vocab_size

    def special_token_id(self, text: str) -> int | None:
        """The special token of that text; None where there is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self.special_token_ids else None

    @cached_property
    def longest_token(self) -> int:
        """Characters of text that a token may stand for, at most."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> TokenArray:
        """Ids of a plain text, read-only. Special tokens in it are recognised.

        BOS is put in front where the model wants it and the text does not begin with it. Raises InvalidRequest for text
        that is not Unicode (lone surrogates).
        """
        ids = self._encode(text)
        bos = self.spec.bos_token_id
        if self.spec.add_bos and bos is not None and (not len(ids) or ids[0] != bos):
            return np.concatenate([np.array([bos], dtype=np.uint32), ids])
        return ids

    def render_chat(self, prompt: ChatPrompt) -> str:
        """The text that the model's chat template makes. InvalidRequest when there is no template or it refuses."""
        if isinstance(self._template, InvalidRequest):
            raise InvalidRequest(str(self._template), field=self._template.field)
        return self._template.render(prompt)

    def encode_chat(self, prompt: ChatPrompt) -> TokenArray:
        """Ids of a chat. The template alone says whether there is a BOS, so none is added to what it wrote."""
        return self._encode(self.render_chat(prompt))

    def encode_prompt(self, prompt: PromptForm) -> TokenArray:
        """Ids of a prompt of any form; token ids pass unchanged."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if isinstance(prompt, ChatPrompt):
            return self.encode_chat(prompt)
        return prompt

    def decode(self, ids: Sequence[int] | TokenArray, *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids that the tokenizer does not know give none."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        text: str
        if len(plain) <= _FEW_TOKENS:
            text = self._tokenizer.decode(plain, skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode_batch([plain], skip_special_tokens=skip_special_tokens)[0]
        return text

    def _encode(self, text: str) -> TokenArray:
        """Ids of `text` and nothing added, each piece taken from the cache where it was seen before."""
        pieces = self._cutter.cut(text) if self._cutter is not None else [text]
        found = {piece: self.cache.get(piece) for piece in dict.fromkeys(pieces)}
        missing = [piece for piece, ids in found.items() if ids is None]
        for piece, new_ids in zip(missing, self._encode_batch(missing), strict=True):
            self.cache.put(piece, new_ids)
            found[piece] = new_ids
        arrays = [ids for piece in pieces if (ids := found[piece]) is not None]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _encode_batch(self, texts: list[str]) -> list[TokenArray]:
        if not texts:
            return []
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text is not Unicode: it holds a lone surrogate", field="prompt") from error
        arrays = []
        for encoding in encodings:
            ids = np.array(encoding.ids, dtype=np.uint32)
            ids.flags.writeable = False
            arrays.append(ids)
        return arrays

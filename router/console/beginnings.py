"""How the hottest prefixes begin, in words. What users wrote is shown only where the operator asked for it."""

from __future__ import annotations

from radixfleet.errors import RadixfleetError
from router.api.plain_text import text_of
from router.api.prompts import Prompts
from router.index import HotPrefix

_KEPT = 256
_CHARACTERS = 120


class Beginnings:
    """Remembers what it has decoded: the same prefixes are asked for every second."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._known: dict[int, str] = {}

    def __call__(self, prefix: HotPrefix) -> str:
        """On one line; "" where nothing was kept of the prompt, or its model is gone."""
        if prefix.sample is None:
            return ""
        if prefix.block_hash not in self._known:
            try:
                tokenizer = self._prompts.model(prefix.sample.model).tokenizer
            except RadixfleetError:
                return ""
            if len(self._known) >= _KEPT:
                self._known.clear()
            tokens = prefix.sample.tokens
            told = text_of(tokens) if tokenizer is None else tokenizer.decode(tokens.tolist())
            text = " ".join(told.split())
            self._known[prefix.block_hash] = text[:_CHARACTERS]
        return self._known[prefix.block_hash]

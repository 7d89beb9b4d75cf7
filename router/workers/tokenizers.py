"""The tokenizers of the served models, fetched from workers: one for each fingerprint, however many workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Executor

from radixfleet.text import Tokenizer, TokenizerSpec


class TokenizerStore:
    """Fetches each tokenizer once, makes it off the event loop, and keeps it while a worker needs it."""

    def __init__(self, executor: Executor, named: Mapping[str, Tokenizer] | None = None) -> None:
        """`named`: of models whose engines do not tell theirs, by the model's name."""
        self._executor = executor
        self._named = dict(named or {})
        self._ready: dict[int, Tokenizer] = {}
        self._fetching: dict[int, asyncio.Lock] = {}

    def get(self, fingerprint: int) -> Tokenizer | None:
        """The tokenizer, if it has been fetched."""
        return self._ready.get(fingerprint)

    def named(self, model: str) -> Tokenizer | None:
        """The tokenizer that the operator gave for a model, if any."""
        return self._named.get(model)

    async def ensure(self, fingerprint: int, fetch: Callable[[], Awaitable[bytes]]) -> None:
        """Have the tokenizer; when several ask at once, one fetches and the others wait.

        `fetch` gives the JSON of a TokenizerSpec. Raises ValueError when that is not what the fingerprint says.
        """
        async with self._fetching.setdefault(fingerprint, asyncio.Lock()):
            if fingerprint not in self._ready:
                data = await fetch()
                make = asyncio.get_running_loop().run_in_executor(self._executor, _make, data, fingerprint)
                self._ready[fingerprint] = await make

    def keep_only(self, fingerprints: Collection[int]) -> None:
        """Forget the others."""
        for fingerprint in self._ready.keys() - fingerprints:
            del self._ready[fingerprint]
            self._fetching.pop(fingerprint, None)


def _make(data: bytes, fingerprint: int) -> Tokenizer:
    spec = TokenizerSpec.from_json(data)
    if spec.fingerprint() != fingerprint:
        raise ValueError("the worker's tokenizer is not the one that its fingerprint names")
    return Tokenizer(spec)

"""The tokenizers of the served models, fetched from workers: one for each fingerprint, however many workers.

To read a large one takes seconds in which Python runs nothing else, on whatever thread: so each is read once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from typing import TypeAlias

import msgspec
import xxhash

from radixfleet.text import Tokenizer, TokenizerSpec
from radixfleet.tokenizer_files import ArchivedFiles, archived_files

_Source: TypeAlias = tuple[int, tuple[int, ...], int]
"""A digest of what is in an engine's files, and what it says beside them: ends of sequences, and how many tokens."""


class TokenizerStore:
    """Fetches each tokenizer once, makes it off the event loop, and keeps it while a worker needs it."""

    def __init__(self, executor: Executor | None, named: Mapping[str, Tokenizer] | None = None) -> None:
        """`executor`: None for the event loop's own.

        `named`: of models whose engines do not tell theirs, by the model's name.
        """
        self._executor = executor
        self._named = dict(named or {})
        self._ready: dict[int, Tokenizer] = {}
        self._fetching: dict[int, asyncio.Lock] = {}
        self._archived: dict[_Source, int] = {}
        """Fingerprints of those in `_ready` that came as files."""
        self._reading = asyncio.Lock()

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

    async def tokenizer_of(
        self, archive: bytes, *, eos_token_ids: Sequence[int], vocab_size: int
    ) -> tuple[Tokenizer, int]:
        """See `Archives`."""
        loop = asyncio.get_running_loop()
        async with self._reading:
            files, digest = await loop.run_in_executor(self._executor, _opened, archive)
            source = digest, tuple(eos_token_ids), vocab_size
            if source not in self._archived:
                tokenizer, fingerprint = await loop.run_in_executor(self._executor, _read, files, source)
                self._ready[fingerprint], self._archived[source] = tokenizer, fingerprint
            fingerprint = self._archived[source]
            return self._ready[fingerprint], fingerprint

    def keep_only(self, fingerprints: Collection[int]) -> None:
        """Forget the others."""
        for fingerprint in self._ready.keys() - fingerprints:
            del self._ready[fingerprint]
            self._fetching.pop(fingerprint, None)
        self._archived = {source: known for source, known in self._archived.items() if known in self._ready}


def _make(data: bytes, fingerprint: int) -> Tokenizer:
    spec = TokenizerSpec.from_json(data)
    if spec.fingerprint() != fingerprint:
        raise ValueError("the worker's tokenizer is not the one that its fingerprint names")
    return Tokenizer(spec)


def _opened(archive: bytes) -> tuple[ArchivedFiles, int]:
    files = archived_files(archive)
    return files, xxhash.xxh3_128_intdigest(msgspec.msgpack.encode(files))


def _read(files: ArchivedFiles, source: _Source) -> tuple[Tokenizer, int]:
    _, eos_token_ids, vocab_size = source
    spec = files.spec(eos_token_ids=eos_token_ids, vocab_size=vocab_size)
    return Tokenizer(spec), spec.fingerprint()

"""Which routing blocks the worker is going to compute: those of prompts that it has accepted and not computed yet.

A router knows the prompts that it sent. Of those that came by another router, or from a client directly, it would hear
only when they are computed, and until then send others that share them elsewhere. So the front tells what is coming, as
changes of one set:

    coming = blocks of the prompts of accepted requests  -  cached blocks, as watchers know them

A block that watchers are told is cached leaves the set without a word; those that leave it uncached, because their
requests ended before, are told as gone. A request's end counts only once the engine has reported after it, for that
report may have the last of what the request left in the cache. A request that is put back, and whose blocks are evicted
while it waits, is coming again. Pure; one an incarnation. Which requests there are says `acceptance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from worker.servicer.prefixes import PrefixChange


@dataclass(frozen=True, slots=True)
class PromptChange:
    """What is coming besides, and what of it comes no more. Block hashes as they travel, in the order of prompts."""

    coming: bytes = b""
    gone: bytes = b""


class ComingPrompts:
    """See the module."""

    def __init__(self, cached: Set[int]) -> None:
        """`cached`: the blocks that watchers know as cached. It changes just before `commit`, and never else."""
        self._cached = cached
        self._requests: dict[int, int] = {}
        """How many accepted requests have the block in their prompts."""
        self._told: set[int] = set()
        """What watchers know to be coming. Disjoint from `_cached`."""
        self._touched: dict[int, None] = {}
        """Blocks that may have joined or left the set, in order."""
        self._ended: list[list[int]] = []
        """Blocks of requests that ended after the last report, ..."""
        self._over: list[list[int]] = []
        """... and of those that ended before it."""

    def __len__(self) -> int:
        """Blocks of accepted requests."""
        return len(self._requests)

    def depth(self, blocks: list[int]) -> int:
        """How many leading blocks are cached or come with requests that were accepted before."""
        requests, cached = self._requests, self._cached
        return sum(1 for _ in takewhile(lambda block: block in requests or block in cached, blocks))

    def accept(self, blocks: list[int]) -> None:
        """A request with these prompt blocks is on its way to the engine. Give the same to `end`."""
        requests = self._requests
        self._touched.update(dict.fromkeys(block for block in blocks if block not in requests))
        for block in blocks:
            requests[block] = requests.get(block, 0) + 1

    def end(self, blocks: list[int]) -> None:
        """The request has ended, however it did. Once a request."""
        self._ended.append(blocks)

    def reported(self) -> None:
        """The engine reported its cache: requests that ended before leave nothing more in it."""
        self._over += self._ended
        self._ended = []

    def commit(self, change: PrefixChange | None) -> PromptChange:
        """What has changed since the last call. `change`: of the cached blocks, which watchers are told first."""
        if change is not None:
            for packed in (change.evicted, change.added):
                blocks = np.frombuffer(packed, dtype="<u8").tolist()
                self._touched.update(dict.fromkeys(filter(self._requests.__contains__, blocks)))
        for blocks in self._over:
            self._release(blocks)
        self._over = []
        touched, self._touched = self._touched, {}
        requests, cached, told = self._requests, self._cached, self._told
        known = told.intersection(touched)
        told.difference_update(known)
        uncached = [block for block in touched if block not in cached]
        coming = [block for block in uncached if block in requests]
        gone = [block for block in known if block not in requests and block not in cached]
        told.update(coming)
        return PromptChange(_pack([block for block in coming if block not in known] if known else coming), _pack(gone))

    def whole(self) -> bytes:
        """All that watchers know to be coming."""
        return _pack(self._told)

    def _release(self, blocks: list[int]) -> None:
        requests, touched = self._requests, self._touched
        for block in blocks:
            left = requests[block] - 1
            if left:
                requests[block] = left
            else:
                del requests[block]
                touched[block] = None


def _pack(blocks: Iterable[int]) -> bytes:
    return np.fromiter(blocks, dtype="<u8").tobytes()

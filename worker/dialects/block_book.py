"""The cached routing blocks with their tokens, as the engine's reports tell them. Pure.

Engines elsewhere number or hash their blocks in their own ways, so whoever follows several of them goes by the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS
from worker.core.arrays import Int32Array
from worker.core.messages import BlockRun, Report


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block of 64 tokens that ends a cached prefix."""

    hash: int
    parent: int | None
    """Hash of the block before it; None at the beginning of a prefix."""
    token_ids: Int32Array
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Change:
    """What a report changed. `stored` has parents before their children."""

    removed: list[int]
    stored: list[Block]


class BlockBook:
    """Complete from the first report that tells all blocks, until `clear`."""

    def __init__(self) -> None:
        self.is_complete = False
        self._blocks: dict[int, Block] = {}
        # A dict keeps its order, and nothing is in the cache without its parent, so parents come first here, too.

    def blocks(self) -> list[Block]:
        """All blocks, parents before their children."""
        return list(self._blocks.values())

    def apply(self, report: Report) -> Change | None:
        """Take in a report. None until one has told the tokens of all blocks: before that, nothing is known."""
        if report.block_runs is None or not (self.is_complete or report.has_all_blocks):
            return None
        told = {block.hash: block for run in report.block_runs for block in _blocks(run)}
        if not self.is_complete:
            self.is_complete = True
            self._blocks = told
            return Change([], self.blocks())
        removed = [block for block in report.evicted_blocks.tolist() if self._blocks.pop(block, None) is not None]
        added = set(report.added_blocks.tolist())
        stored = [block for block in told.values() if block.hash in added and block.hash not in self._blocks]
        self._blocks.update((block.hash, block) for block in stored)
        return Change(removed, stored)

    def clear(self) -> None:
        """The engine is gone, or nobody follows."""
        self._blocks.clear()
        self.is_complete = False


def _blocks(run: BlockRun) -> Iterator[Block]:
    _, _, cache_salt = run.namespace if len(run.namespace) == 3 else ("", "", "")
    parent = run.parent if run.first else None
    for block, token_ids in zip(run.hashes.tolist(), np.reshape(run.token_ids, (-1, BLOCK_TOKENS)), strict=True):
        yield Block(block, parent, token_ids, cache_salt)
        parent = block

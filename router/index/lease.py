"""One request's hold on the blocks of its prompt in the sketch."""

from __future__ import annotations

from dataclasses import dataclass

from radixfleet.blocks import BLOCK_TOKENS
from router.index.mirror import Mirror


@dataclass(slots=True, eq=False)
class BlockLease:
    """Made by `Sketch.book` and ended once, by `Sketch.end` or `Sketch.abandon`. Its holder only reads it."""

    slot: int
    blocks: list[int]
    """Hashes of the prompt's whole blocks, the first block first."""
    prompt_tokens: int
    known_blocks: int
    """Leading blocks that the sketch took to be on the worker when the request was booked."""
    lasting_blocks: int
    """Those of them that the worker was going to hold still when it begins the request: the prediction."""
    joined_blocks: int
    """Blocks that came to the mirror with it."""
    settled_use: int | None
    """Tick of the last use of the deepest known block; None: there is none, or it was only expected."""
    mirror: Mirror
    """Where it was booked. A restart of the worker replaces its mirror, and the lease then has no more to say."""
    is_open: bool = True
    is_begun: bool = False
    """The worker has begun it, or never will."""

    @property
    def predicted_tokens(self) -> int:
        """Prompt tokens expected in the worker's cache. Never all: the last token is always computed."""
        return max(0, min(self.lasting_blocks * BLOCK_TOKENS, self.prompt_tokens - 1))

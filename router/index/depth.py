"""How deep a set of blocks goes along a prompt."""

from __future__ import annotations

from collections.abc import Callable


def depth_of(blocks: list[int], most: int, holds: Callable[[int], bool]) -> int:
    """How many leading `blocks` hold, of the first `most`: by binary search, for none holds without its parent."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(blocks[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low

"""What a runner says of a step for which the device had not enough memory. Plain data."""

from __future__ import annotations

import msgspec


class OutOfMemory(msgspec.Struct, frozen=True, array_like=True):
    """The step can be computed again, smaller: nothing but memory was in the way."""

    needed_bytes: int | None
    """The allocation that failed; None where the allocator does not say."""
    free_bytes: int | None
    """What the device had free at that moment."""
    in_sampling: bool
    """All layers were computed; logits or sampling ran out."""

"""Who uses the deepest block that each worker holds of a prompt: looked up when asked, of few of a thousand workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixfleet.clock import Clock
from radixfleet.types import HashArray
from router.index.mirror import Mirror

DepthArray = npt.NDArray[np.intp]


@dataclass(slots=True, eq=False)
class Users(Mapping[int, int]):
    """The users of the deepest matched block on each worker: see `Sketch.users`.

    Computed when asked for, because a policy asks for few of a thousand workers. Not frozen: that is twice as slow.
    """

    mirrors: Sequence[Mirror | None]
    hashes: HashArray
    depths: DepthArray

    def __getitem__(self, slot: int) -> int:
        users = self.get(slot)
        if not users:
            raise KeyError(slot)
        return users

    def get(self, slot: int, default: int = 0) -> int:  # type: ignore[override]  # without an exception inside
        """Users on the worker in `slot`; `default` where there are none."""
        depth, mirror = self.depths.item(slot), self.mirrors[slot]
        return (mirror.users(self.hashes.item(depth - 1)) if depth and mirror is not None else 0) or default

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and self.get(slot) > 0

    def __iter__(self) -> Iterator[int]:
        return (slot for slot in self.depths.nonzero()[0].tolist() if slot in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(slots=True, eq=False)
class UsedFor(Mapping[int, float]):
    """For how long the deepest matched block on each worker has been in use: see `Sketch.used_for_s`."""

    mirrors: Sequence[Mirror | None]
    hashes: HashArray
    depths: DepthArray
    clock: Clock

    def __getitem__(self, slot: int) -> float:
        used_s = self.get(slot, -1.0)
        if used_s < 0:
            raise KeyError(slot)
        return used_s

    def get(self, slot: int, default: float = 0.0) -> float:  # type: ignore[override]  # as above
        """Seconds on the worker in `slot`; `default` where the block is not in use."""
        depth, mirror = self.depths.item(slot), self.mirrors[slot]
        since_s = mirror.used_since_s(self.hashes.item(depth - 1)) if depth and mirror is not None else None
        return default if since_s is None else self.clock.now() - since_s

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and self.get(slot, -1.0) >= 0

    def __iter__(self) -> Iterator[int]:
        return (slot for slot in self.depths.nonzero()[0].tolist() if slot in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

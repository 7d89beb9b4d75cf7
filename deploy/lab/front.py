"""The front of a simulated worker: tells which prompts are coming, as real fronts do where several routers listen."""

from __future__ import annotations

import numpy as np

from deploy.lab.router import ComingBlocks
from deploy.lab.worker import HashArray
from worker.servicer.prefixes import PrefixMirror
from worker.servicer.prompts import ComingPrompts


class SimulatedFront:
    """Of one incarnation."""

    def __init__(self) -> None:
        self._prefixes = PrefixMirror()
        self._prompts = ComingPrompts(self._prefixes.blocks)
        self._accepted: dict[int, list[int]] = {}
        """Prompt blocks of the requests that have not ended, by uid."""

    def accept(self, uid: int, hashes: HashArray) -> None:
        """A request has come."""
        self._accepted[uid] = self._prompts.accept(hashes)

    def end(self, uid: int) -> None:
        """It has ended."""
        self._prompts.end(self._accepted.pop(uid))

    def report(self, evicted: HashArray, added: HashArray) -> ComingBlocks:
        """What routers are told with a report of the engine."""
        self._prefixes.apply(evicted, added)
        self._prompts.reported()
        change = self._prompts.commit(self._prefixes.commit())
        return ComingBlocks(np.frombuffer(change.coming, np.uint64), np.frombuffer(change.gone, np.uint64))

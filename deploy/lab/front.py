"""The front of a simulated worker: tells what it has accepted, as real fronts do where several routers listen."""

from __future__ import annotations

import numpy as np

from deploy.lab.router import AcceptedPrompts
from radixfleet.types import HashArray
from worker.servicer.acceptance import Acceptance, AcceptedRequest
from worker.servicer.prefixes import PrefixChange, PrefixMirror
from worker.servicer.prompts import ComingPrompts


class SimulatedFront:
    """Of one incarnation."""

    def __init__(self) -> None:
        self._prefixes = PrefixMirror()
        self._prompts = ComingPrompts(self._prefixes.blocks)
        self._acceptance = Acceptance(self._prompts)
        self._accepted: dict[int, AcceptedRequest] = {}
        """Those that have not ended, by uid."""

    def accept(self, uid: int, hashes: HashArray, prompt_tokens: int) -> None:
        """A request has come."""
        self._accepted[uid] = self._acceptance.accept(lambda: hashes, prompt_tokens, is_told=True)

    def admitted(self, uid: int, cached_tokens: int) -> None:
        """It is being computed."""
        self._accepted[uid].admitted(cached_tokens)

    def first_token(self, uid: int) -> None:
        """Its prompt is computed."""
        self._accepted[uid].first_token()

    def end(self, uid: int) -> None:
        """It has ended."""
        self._accepted.pop(uid).end()

    def report(self, evicted: HashArray, added: HashArray) -> AcceptedPrompts:
        """What routers are told with a report of the engine."""
        self._prefixes.apply(evicted, added)
        self._prompts.reported()
        return self._told(self._prefixes.commit())

    def tell(self) -> AcceptedPrompts:
        """What routers are told between two reports."""
        return self._told(None)

    def _told(self, change: PrefixChange | None) -> AcceptedPrompts:
        told, load = self._prompts.commit(change), self._acceptance.load
        assert load is not None, "all requests are told of"
        return AcceptedPrompts(np.frombuffer(told.coming, np.uint64), np.frombuffer(told.gone, np.uint64), load)

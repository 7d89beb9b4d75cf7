"""The front of a simulated worker. Where several routers send to one worker, each learns from its front which prompts
the others have sent: blocks that the worker has accepted and not computed yet. Made of the real front's own parts.
"""

from __future__ import annotations

import numpy as np

from deploy.lab.router import AcceptedPrompts
from radixfleet.types import HashArray
from worker.servicer.acceptance import Acceptance, AcceptedRequest
from worker.servicer.prefixes import PrefixChange, PrefixMirror
from worker.servicer.prompts import ComingPrompts


class SimulatedFront:
    """The front of one incarnation of a worker: what it has accepted, and what it reports of that."""

    def __init__(self) -> None:
        self._prefixes = PrefixMirror()
        self._prompts = ComingPrompts(self._prefixes.blocks)
        self._acceptance = Acceptance(self._prompts)
        self._accepted: dict[int, AcceptedRequest] = {}
        """Requests that have not ended, by uid."""

    def accept(self, uid: int, hashes: HashArray, prompt_tokens: int) -> None:
        """A request has arrived, with the hashes of its prompt's whole blocks."""
        self._accepted[uid] = self._acceptance.accept(lambda: hashes, prompt_tokens, is_told=True)

    def admitted(self, uid: int, cached_tokens: int) -> None:
        """The engine has begun to compute the request, and found `cached_tokens` of its prompt."""
        self._accepted[uid].admitted(cached_tokens)

    def first_token(self, uid: int) -> None:
        """The request's prompt is computed."""
        self._accepted[uid].first_token()

    def end(self, uid: int) -> None:
        """The request has ended."""
        self._accepted.pop(uid).end()

    def report(self, evicted: HashArray, added: HashArray) -> AcceptedPrompts:
        """Take a report of the engine: blocks that left and joined its cache. Returns what routers get with it."""
        self._prefixes.apply(evicted, added)
        self._prompts.reported()
        return self._told(self._prefixes.commit())

    def tell(self) -> AcceptedPrompts:
        """What routers get between two reports of the engine."""
        return self._told(None)

    def _told(self, change: PrefixChange | None) -> AcceptedPrompts:
        told, load = self._prompts.commit(change), self._acceptance.load
        assert load is not None, "all requests are told of"
        return AcceptedPrompts(np.frombuffer(told.coming, np.uint64), np.frombuffer(told.gone, np.uint64), load)

"""The requests that the worker has accepted and not ended, for routers that did not send them.

Two things are told of them, both as the front knows them at the moment, ahead of what the engine reports: which blocks
are coming with their prompts (`prompts`), and how much there is to compute:

    accepted -----------> admitted -----------> first token ---> ended
    what is neither       prompt tokens less    none             not counted any more
    cached nor coming     what was cached

Routers book their own requests in the same way, so what goes beyond that is others' work (see `router.workers.books`).

A single watcher has sent all prompts itself, so nothing is told, nor hashed, until there is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.types import AcceptedLoad, HashArray
from worker.servicer.prompts import ComingPrompts

PROMPT_S = 0.05
"""Watchers are told of new requests at once, unless the last update went out so shortly before. By what they knew 75 to
150 ms ago they send work to where others have just sent theirs (`python -m tests.bench.bench_lab_routers`: mean time to
first token 8 to 20 % longer than with one router). An update costs a router about 0.15 ms.
"""


class Acceptance:
    """Of one incarnation. Knows all requests, and tells of all, or of none that came while there was nobody to tell."""

    def __init__(self, coming: ComingPrompts) -> None:
        self._coming = coming
        self._untold: dict[AcceptedRequest, None] = {}
        self._requests = 0
        self._tokens = 0

    @property
    def load(self) -> AcceptedLoad | None:
        """All that is accepted; None where there are requests that nobody is told of."""
        return None if self._untold else AcceptedLoad(self._requests, self._tokens)

    def accept(self, block_hashes: Callable[[], HashArray], prompt_tokens: int, *, is_told: bool) -> AcceptedRequest:
        """A request was submitted. `block_hashes`: of its prompt, if ever needed."""
        request = AcceptedRequest(self, block_hashes, prompt_tokens)
        if is_told:
            self._tell_of(request)
        else:
            self._untold[request] = None
        return request

    def tell(self) -> bool:
        """From now on tell of what was not told of. True: there was something."""
        untold, self._untold = self._untold, {}
        for request in untold:
            self._tell_of(request)
        return bool(untold)

    def revise(self, request: AcceptedRequest, uncached: int) -> None:
        """So many tokens of its prompt are to be computed."""
        if request.blocks is not None:
            self._tokens += uncached - request.uncached
        request.uncached = uncached

    def end(self, request: AcceptedRequest) -> None:
        """It has ended."""
        if request.blocks is None:
            del self._untold[request]
            return
        self.revise(request, 0)
        self._requests -= 1
        self._coming.end(request.blocks)

    def _tell_of(self, request: AcceptedRequest) -> None:
        blocks: list[int] = request.block_hashes().tolist()
        if not request.is_admitted:
            request.uncached = max(0, request.prompt_tokens - self._coming.depth(blocks) * BLOCK_TOKENS)
        request.blocks = blocks
        self._coming.accept(blocks)
        self._requests += 1
        self._tokens += request.uncached


@dataclass(slots=True, eq=False)
class AcceptedRequest:
    """A request that was accepted and has not ended. Whoever answers it reports its progress here."""

    acceptance: Acceptance
    block_hashes: Callable[[], HashArray]
    prompt_tokens: int
    uncached: int = 0
    """Prompt tokens that are to be computed: known once the request is admitted, or told to the routers."""
    is_admitted: bool = False
    blocks: list[int] | None = None
    """Blocks of the prompt that routers were told of; None: they were told nothing of this request."""

    def admitted(self, cached_tokens: int) -> None:
        """The engine has begun to compute the prompt, and found `cached_tokens` of it in the cache."""
        self.is_admitted = True
        self.acceptance.revise(self, max(0, self.prompt_tokens - cached_tokens))

    def first_token(self) -> None:
        """The prompt is computed."""
        self.is_admitted = True
        self.acceptance.revise(self, 0)

    def end(self) -> None:
        """It has ended, however it did. Once."""
        self.acceptance.end(self)

"""One request on one worker, from its choice to its end: the one owner of every counter that it moves.

    chosen ---- started ---- first token ---- settled        (any step may be skipped; `settle` comes exactly once)
      |            |              |              |
      books +1     receipt:       books: prompt  books -1, blocks released with the output behind them,
      blocks       real uncached  tokens -> 0    the breaker told
      leased       tokens

`settle` may be called again and does nothing then, so every path may end with it. On the event loop only.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from radixfleet.types import TokenArray
from router.dispatch.request import PreparedRequest
from router.index import BlockLease, HotPrefixes, Sketch
from router.metrics import RouterMetrics
from router.view import Reason
from router.workers.state import WorkerState

LARGEST_FOREIGN_BLOCK = 128
"""Tokens in a KV block of other engines; vLLM has so many on CPUs."""
NO_TOKENS: TokenArray = np.zeros(0, dtype=np.uint32)


class Verdict(Enum):
    """What the request's end says of the worker."""

    ANSWERED = auto()
    """It works, whatever it answered."""
    FAILED = auto()
    """It could not be reached, broke off, or never answered."""
    UNKNOWN = auto()
    """Nothing: the request ended before it could tell."""


class Decision(NamedTuple):
    """How the worker was chosen."""

    policy: str
    reason: Reason
    predicted_cached_tokens: int
    """Prompt tokens expected in the chosen worker's cache when it begins the request."""
    reachable_cached_tokens: int
    """The same for the eligible worker that holds most of the prompt."""


class Lease:
    """See the module. Making one books it: do so in the same turn of the event loop as the choice."""

    def __init__(
        self,
        request: PreparedRequest,
        worker: WorkerState,
        decision: Decision,
        blocks: BlockLease,
        *,
        number: int,
        sketch: Sketch,
        metrics: RouterMetrics,
        hot_prefixes: HotPrefixes | None = None,
    ) -> None:
        """`blocks`: booked in the sketch. `number`: of the booking, counted over the whole fleet."""
        self.request = request
        self.worker = worker
        self.decision = decision
        self.is_open = True
        self.is_started = False
        self.waited_s = 0.0
        """How long the request waited for it."""
        self._sketch = sketch
        self._metrics = metrics
        self._hot_prefixes = hot_prefixes
        self._awaits_receipt = False
        self._is_probe = worker.breaker.acquire()
        self._blocks = blocks
        self._booking = worker.book(request.prompt_tokens - decision.predicted_cached_tokens, number)

    def started(self, cached_tokens: int | None) -> None:
        """The worker computes the prompt, of which it found `cached_tokens` in its cache; None: it will tell later."""
        if not self.is_open or self.is_started:
            return
        self.is_started = True
        if cached_tokens is None:
            self._awaits_receipt = True
        else:
            self._count(cached_tokens)
            self._sketch.receipt(self._blocks, cached_tokens)
            self.worker.books.revise(self._booking, max(0, self.request.prompt_tokens - cached_tokens))
        self.worker.changed()
        if self._is_probe:
            self.worker.breaker.success(probe=True)
            self._is_probe = False

    def receipt(self, cached_tokens: int, prompt_tokens: int) -> None:
        """The worker tells at the end how much of the prompt it had cached, of `prompt_tokens` by its own count.

        Counts for an engine that did not tell at the start. Its tokens may be others than the router's, and its blocks
        larger: what is short of the prediction by less than a block is not held against it.
        """
        if not self.is_open or not self._awaits_receipt:
            return
        self._awaits_receipt = False
        ours = self.request.prompt_tokens
        cached = min(ours, round(cached_tokens * ours / prompt_tokens)) if prompt_tokens else cached_tokens
        self._count(cached)
        predicted = self.decision.predicted_cached_tokens
        is_short = predicted - cached > LARGEST_FOREIGN_BLOCK
        self._sketch.receipt(self._blocks, cached if is_short else max(cached, predicted))

    def first_token(self) -> None:
        """The prompt is computed. May be called with every token."""
        if self.is_open and self._booking.tokens:
            self.worker.books.computed(self._booking)
            self.worker.changed()

    def settle(self, verdict: Verdict, output: TokenArray = NO_TOKENS) -> None:
        """The request is over; `output` are the tokens that it generated."""
        if not self.is_open:
            return
        self.is_open = False
        booked_at_s = self._booking.booked_at_s
        # An engine that tells nothing before the end may have begun to answer before it began to compute.
        may_wait = self._awaits_receipt and self._booking.tokens > 0 and verdict is not Verdict.ANSWERED
        self.worker.books.close(self._booking)
        if self.is_started and not may_wait:
            self._sketch.end(self._blocks, self.request.output_hashes(output) if len(output) else None)
        else:
            self._sketch.abandon(self._blocks)
        breaker = self.worker.breaker
        if verdict is Verdict.ANSWERED:
            breaker.success(probe=self._is_probe)
        elif verdict is Verdict.FAILED:
            breaker.failure(sent_at_s=booked_at_s, probe=self._is_probe)
        else:
            breaker.neither(probe=self._is_probe)
        self.worker.changed()

    def _count(self, cached_tokens: int) -> None:
        request, decision = self.request, self.decision
        asked = request.prompt_tokens
        reachable, predicted = decision.reachable_cached_tokens, decision.predicted_cached_tokens
        self._metrics.prompt_tokens.count(asked, reachable, predicted, cached_tokens)
        self.worker.activity.started(asked, reachable, predicted, cached_tokens)
        if self._hot_prefixes is not None:
            self._hot_prefixes.saved(request.block_hashes, request.tokens, request.model, cached_tokens)

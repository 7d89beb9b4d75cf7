"""Who gives way when pages are short, or when somebody of higher priority waits.

Where pages are short for the running requests' next tokens, cached prefixes are evicted, then the requests admitted
last are retracted (with preemption, those of the lowest priority, the newest of them first). As long as a retracted
request has steps in flight, its pages are not free yet, and a request that finds no page skips a step. The oldest (of
the highest priority) is never retracted, so it always gets on, and so in turn does each. When it runs alone and pages
are still short, the pool holds only its own pages and the cache's copies of tokens that it computed a second time: the
copies are freed.

With preemption, a running request is also retracted for the next in the queue, if that one has a higher priority and
found no row or no room: the newest of the lowest priority. That is done for one request at a time, and each comes back
after the one that it left for, so none is retracted twice for the same request.

Used by the scheduler alone.
"""

from __future__ import annotations

import numpy as np

from worker.memory.advisor import Shortage, Stage, advise
from worker.scheduling.admission import Admission
from worker.scheduling.counters import Counters
from worker.scheduling.holdings import Holdings
from worker.scheduling.lifecycle import Lifecycle
from worker.scheduling.limits import Limits
from worker.scheduling.request import Request, State
from worker.scheduling.shortages import Shortages


class Scarcity:
    """See the head of the module."""

    def __init__(
        self,
        limits: Limits,
        holdings: Holdings,
        admission: Admission,
        lifecycle: Lifecycle,
        counters: Counters,
        shortages: Shortages,
    ) -> None:
        self._limits = limits
        self._holdings = holdings
        self._admission = admission
        self._lifecycle = lifecycle
        self._counters = counters
        self._shortages = shortages

    def grant(self, ready: list[Request], needy: list[Request], *, may_settle: bool) -> list[Request]:
        """Those of `ready` that decode in this step, where not each of `needy` can have the page that it needs.

        `may_settle`: steps are in flight, and pages may come of them.
        """
        needy = self._make_room(needy)
        if needy and not self._holdings.available_pages and not may_settle:
            # Alone, with nothing left to evict and nothing to wait for: all that the pool holds beside it are copies.
            self._holdings.exchange_duplicates(needy[0].held)
        num_granted = min(len(needy), self._holdings.available_pages)
        granted = self._holdings.grow(np.array([request.held.row for request in needy[:num_granted]], dtype=np.int64))
        assert granted, "pages that are available can be had"
        stalled = needy[num_granted:]
        if stalled and not may_settle and not num_granted:
            # It is never going to fit.
            self._lifecycle.fail_outgrown(stalled.pop())
        self._counters.stalled_decodes += len(stalled)
        skipped = set(stalled)
        return [r for r in ready if r.state is State.DECODE and r not in skipped]

    def _make_room(self, needy: list[Request]) -> list[Request]:
        """Retract, newest first, until each of `needy` has a page or one is released for it; returns those left."""
        running = self._lifecycle.running
        growing = [request for request in running if request.is_growing]
        if self._limits.preempt:
            growing.sort(key=lambda request: -request.submit.priority)
        ending = [request for request in running if not request.is_growing]
        while len(growing) > 1 and len(needy) > self._pages_to_come(ending):
            victim = growing.pop()
            self._admission.growth_share.retracted()
            used_tokens = (self._holdings.used_pages + len(needy)) * self._limits.page_size
            shortage = Shortage(used_tokens, self._limits.kv_tokens, kv_bound=self._limits.kv_bound)
            self._shortages.began(Stage.KV_FULL, advise(Stage.KV_FULL, shortage))
            self._lifecycle.retract(victim)
            needy = [request for request in needy if request is not victim]
        return needy

    def _pages_to_come(self, ending: list[Request]) -> int:
        return self._holdings.available_pages + self._lifecycle.pages_released_by(ending)

    def preempt(self) -> None:
        """Retract one running request for the next in the queue, if that one is blocked and has a higher priority."""
        blocked, lifecycle = self._admission.blocked, self._lifecycle
        if blocked is None or blocked.waits_for is not None:
            return
        if any(request.state is State.RETRACTED for request in lifecycle.leaving):
            return
        priority, running = blocked.submit.priority, lifecycle.running
        lower = [request for request in running if request.is_growing and request.submit.priority < priority]
        kept = np.array([request.held.row for request in running if request.submit.priority >= priority], np.int64)
        if lower and self._admission.could_fit_beside(blocked, kept):
            self._counters.preemptions += 1
            lifecycle.retract(min(reversed(lower), key=lambda request: request.submit.priority))

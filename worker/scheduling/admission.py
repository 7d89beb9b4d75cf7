"""Who leaves the queue: when there is a place, room for its growth, and no prefix worth waiting for.

There are as many places as requests may run. A request leaves its place when its last token is in flight, so that its
successor computes in the very next step; its row and its pages it keeps until that token has settled.

Requests are tried in the queue's order until one finds no place, no budget or no room; nobody passes by that one, so
that a big request is not starved by small ones. One that waits for a prefix just being computed is passed by: it
holds nothing and waits once at most. A prompt's pages are taken at once, whole, so that a later chunk never finds the
pool full.
"""

from __future__ import annotations

import numpy as np

from worker.memory.cached_prefix import Match
from worker.memory.page_allocator import pages_for
from worker.scheduling.assembly import Piece
from worker.scheduling.forecast import Forecast, GrowthShare
from worker.scheduling.holdings import Holding, Holdings
from worker.scheduling.limits import Limits
from worker.scheduling.prefill import enough_tokens, next_chunk, sibling
from worker.scheduling.queue import WINDOW, WaitingQueue
from worker.scheduling.request import Request
from worker.scheduling.rows import RowIndex
from worker.scheduling.running import Running


class Admission:
    """Owns the queue. Used by the scheduler alone."""

    def __init__(self, limits: Limits, holdings: Holdings) -> None:
        self.queue = WaitingQueue(limits.order, limits.max_overtakes, preempt=limits.preempt)
        self.blocked: Request | None = None
        """The next to be admitted, if it found no place or no room when admission was last tried."""
        self.growth_share = GrowthShare()
        self._limits = limits
        self._holdings = holdings

    def enqueue(self, request: Request) -> None:
        """Let a request wait for its turn."""
        request.known_match = None
        self.queue.push(request)
        self._match(request)

    def admit(self, running: Running, budget: int, seats: int, *, begun_tokens: int) -> list[Piece]:
        """Take at most `seats` requests from the queue, and give each its first chunk: `budget` tokens together.

        Those admitted are in PREFILL, hold a row and all pages for their prompt, and are to be added to `running` by
        the caller. `begun_tokens`: prompt tokens that the step has already, of prompts begun in earlier steps.
        """
        self.blocked = None
        self.queue.let_go()
        admitted: list[Piece] = []
        places = self.places(running) if self.queue.has_candidates else 0
        if places < 1:
            self.blocked = self.queue.first
        seats = min(seats, places)
        enough = enough_tokens(self.queue.prompt_tokens, self._limits.step_cost_tokens)
        unused = max(0, begun_tokens + budget - enough)
        if seats < 1 or budget <= unused:
            return admitted
        rows, columns = running.rows, self._holdings.rows
        unfilled = running.at(rows[columns.settled[rows] < columns.filled[rows]])
        forecast = self._forecast(rows)
        misses = 0
        for request in self.queue.candidates(seats + WINDOW, self._match):
            piece = self._try(request, unfilled, forecast, budget, is_first=not begun_tokens and not admitted)
            if piece is not None:
                admitted.append(piece)
                unfilled.append(request)
                budget -= piece.length
            elif request.waits_for is not None:
                self.queue.hold(request)
                misses += 1
            else:
                break
            if len(admitted) == places:
                self.blocked = self.queue.first
            if misses >= WINDOW or len(admitted) >= seats or budget <= unused:
                break
        self._holdings.provide()
        return admitted

    def places(self, running: Running) -> int:
        """Requests that may join those that run."""
        num_growing = int(np.count_nonzero(self._holdings.rows.to_sample[running.rows]))
        return min(self._limits.max_running_requests - num_growing, self._holdings.table.free_rows)

    def could_fit_beside(self, request: Request, kept: RowIndex) -> bool:
        """Whether a waiting request would find room if `kept` alone ran: a no is sure, a yes is not.

        What `kept` has locked in the cache is not counted, as a part of it may be what `request` shares.
        """
        forecast = self._forecast(kept)
        forecast.add(request, pages_for(len(request.fill_ids) - self._match(request).length, self._limits.page_size))
        return forecast.fits(self._holdings.allocator.total_pages)

    def check(self) -> None:
        """Verify what is known of those that wait; an AssertionError tells what is wrong. O(tokens that wait)."""
        queue, cache = self.queue, self._holdings.cache
        counted = sum(len(request.fill_ids) - request.expected_shared for request in queue)
        assert queue.prompt_tokens == counted, "the tokens that wait are miscounted"
        for request in queue:
            known = request.known_match
            assert known is not None, "it was never looked up"
            assert known.length == request.expected_cached, "what is cached is miscounted"
            fresh = cache.match(request.submit.namespace, request.fill_ids, request.matchable_tokens)
            assert known.length == fresh.length or not known.is_current, "a match is not known to have changed"

    def _try(
        self, request: Request, unfilled: list[Request], forecast: Forecast, budget: int, *, is_first: bool
    ) -> Piece | None:
        """Admit `request`, or leave everything as it was. `unfilled`: those whose prompts are being computed."""
        match = self._match(request)
        request.waits_for = sibling(request, match.length, unfilled, self._limits)
        if request.waits_for is not None:
            return None
        piece = next_chunk(request, match.length, budget, self._limits.page_size, is_first=is_first)
        if piece is None:
            return None
        holding = self._take(request, match, forecast)
        if holding is None:
            self.blocked = request
            return None
        self.queue.take(request)
        request.known_match = None
        request.seat(holding)
        return piece

    def _take(self, request: Request, match: Match, forecast: Forecast) -> Holding | None:
        """Lock what matched and take row and pages for the rest, if the pool can hold what is going to be needed.

        A request that is alone passes, as what could never fit was refused when it was submitted. After a None the
        forecast is used up, for it has the request in it.
        """
        handle = self._holdings.cache.lock(match)
        num_tokens = len(request.fill_ids)
        pages = pages_for(num_tokens - match.length, self._limits.page_size)
        forecast.add(request, pages)
        holding = None
        if self._fits(forecast, pages):
            holding = self._holdings.open(handle, match.pages, num_tokens)
        if holding is None:
            self._holdings.cache.unlock(handle)
        return holding

    def _forecast(self, running: RowIndex) -> Forecast:
        forecast = Forecast(self._limits.page_size, self.growth_share.value)
        forecast.add_all(running, self._holdings.rows)
        return forecast

    def _fits(self, forecast: Forecast, candidate_pages: int) -> bool:
        """The peak of all in `forecast`, beside what is locked in the cache or leaving, stays within the pool."""
        others = self._holdings.used_pages - (forecast.own_pages - candidate_pages)
        return forecast.fits(self._holdings.allocator.total_pages - others)

    def _match(self, request: Request) -> Match:
        """What the cache has of it, looked up again only where that may have changed.

        Where logits are wanted, it is computed all the same.
        """
        known = request.known_match
        if known is not None and known.is_current:
            return known
        cache, limit = self._holdings.cache, request.matchable_tokens
        match = cache.match(request.submit.namespace, request.fill_ids, limit, known=known)
        request.known_match = match
        if match.length != request.expected_cached:
            request.expected_cached = match.length
            self.queue.recount(request)
        return match

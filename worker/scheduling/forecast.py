"""Will the KV pool hold one request more? The peak of what running requests are going to need, and what to count on.

All running requests are taken to grow by one token a step until each has made the tokens it may still make. Memory
then peaks just before one of them ends. With the requests sorted by what they have to come, longest first, the need
when the k-th ends is

    sum over i <= k of  own_pages[i] + pages for (to_come[k] - room[i]) tokens       (those behind k have ended before)

and the peak is the largest of these sums: exact in tokens, and too careful by less than a page a request. Prefixes
that running requests have locked count as locked throughout. (The idea is that of LightLLM's past-future scheduler,
Gong et al., ASPLOS 2025.)

Few requests use all of `max_new_tokens`, so only a share of what is to come is counted (`GrowthShare`): what ended
requests used of theirs, on average and a quarter more. Where that was too little, a request is retracted, and for a
while everything is counted, so that what was retracted does not come back only to be retracted again.
"""

from __future__ import annotations

import math

import numpy as np

from worker.scheduling.request import Request
from worker.scheduling.rows import RowIndex, Rows

_MARGIN = 1.25
_MEMORY = 50
"""Ended requests over which the share is averaged."""
_RECOVERY_STEPS = 256
"""Steps after a retraction until the learned share counts alone again."""


class GrowthShare:
    """The part of the tokens to come that admission counts on, in (0, 1]. Begins at 1 and learns."""

    def __init__(self) -> None:
        self._mean = 1.0
        self._num_ended = 0
        self._caution = 0.0

    @property
    def value(self) -> float:
        """The share to count now."""
        return min(1.0, max(self._mean * _MARGIN, self._caution))

    @property
    def is_cautious(self) -> bool:
        """A retraction is not long ago."""
        return self._caution > 0.0

    def ended(self, used: float) -> None:
        """A request ended by itself after `used` (0 to 1) of its max_new_tokens."""
        self._num_ended = min(self._num_ended + 1, _MEMORY)
        self._mean += (used - self._mean) / (self._num_ended + 1)

    def stepped(self) -> None:
        """A step was planned: caution fades."""
        self._caution = max(0.0, self._caution - 1.0 / _RECOVERY_STEPS)

    def retracted(self) -> None:
        """A request was retracted, so the share was too small: count everything for a while."""
        self._caution = 1.0


class Forecast:
    """The peak over a set of running requests, to which candidates are added. Made anew for each plan."""

    def __init__(self, page_size: int, share: float) -> None:
        self._page_size = page_size
        self._share = share
        self._running = np.empty((3, 0), np.int64)
        """int64 [3, requests] of the running ones: tokens to come, owned pages, tokens that rounding up can add."""
        self._added: list[tuple[int, int, int]] = []
        """The same three numbers of each candidate."""
        self.own_pages = 0
        """Pages that the requests own now."""
        self._growth = 0
        """Tokens for which more pages are needed until each has all of its own, rounding up included."""

    def add(self, request: Request, own_pages: int) -> None:
        """A waiting request, which is going to own `own_pages` pages, those for its whole prompt included."""
        length = len(request.fill_ids)
        to_come = math.ceil((request.final_tokens - length) * self._share)
        rounding = self._page_size - 1 - -length % self._page_size
        self._added.append((to_come, own_pages, rounding))
        self.own_pages += own_pages
        self._growth += to_come + rounding

    def add_all(self, running: RowIndex, rows: Rows) -> None:
        """Add all running requests, which hold what they own already. Called once."""
        assert not self._running.size, "they are added at once"
        own = rows.own_pages[running]
        length = np.maximum(rows.planned[running], rows.filled[running])
        to_come = np.ceil((rows.final[running] - length) * self._share).astype(np.int64)
        rounding = self._page_size - 1 - -length % self._page_size
        self._running = np.array([to_come, own, rounding])
        self.own_pages += int(own.sum())
        self._growth += int(to_come.sum() + rounding.sum())

    def fits(self, num_pages: int) -> bool:
        """Whether `num_pages` are enough at the peak. Nothing is sorted where all growth at once fits."""
        return self.own_pages + self._growth // self._page_size <= num_pages or self.peak_pages() <= num_pages

    def peak_pages(self) -> int:
        """The most pages that all requests will own together."""
        added = np.array(self._added, np.int64).reshape(-1, 3).T
        to_come, own, rounding = np.concatenate([self._running, added], axis=1)
        if not len(to_come):
            return 0
        longest_first = np.argsort(-to_come, kind="stable")
        growing = np.arange(1, len(to_come) + 1) * to_come[longest_first]
        room = rounding[longest_first].cumsum()
        return int((own[longest_first].cumsum() + (growing + room) // self._page_size).max())

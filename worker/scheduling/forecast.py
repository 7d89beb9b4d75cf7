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
from worker.scheduling.rows import Column, RowIndex, Rows

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
        """It was too little."""
        self._caution = 1.0


class Forecast:
    """The peak over a set of running requests, to which candidates are added. Made anew for each plan.

    The arrays are sorted by what is to come, longest first.
    """

    def __init__(self, page_size: int, share: float) -> None:
        self._page_size = page_size
        self._share = share
        self._to_come = self._own = self._rounding = np.empty(0, np.int64)
        self.own_pages = 0
        """Pages that the requests own now."""

    def add(self, request: Request, own_pages: int) -> None:
        """One request more, which owns `own_pages` pages, those for its whole prompt included."""
        length = max(request.planned, len(request.fill_ids))
        to_come = math.ceil((request.final_tokens - length) * self._share)
        rounding = self._page_size - 1 - -length % self._page_size
        place = len(self._to_come) - int(np.searchsorted(self._to_come[::-1], to_come, side="left"))
        self._to_come = _inserted(self._to_come, place, to_come)
        self._own = _inserted(self._own, place, own_pages)
        self._rounding = _inserted(self._rounding, place, rounding)
        self.own_pages += own_pages

    def add_all(self, running: RowIndex, rows: Rows) -> None:
        """All of them, which hold what they own. Only once, and before the others."""
        assert not len(self._to_come), "the first to be added"
        own = rows.own_pages[running]
        length = np.maximum(rows.planned[running], rows.filled[running])
        to_come = np.ceil((rows.final[running] - length) * self._share).astype(np.int64)
        longest_first = np.argsort(-to_come, kind="stable")
        self._to_come, self._own = to_come[longest_first], own[longest_first]
        self._rounding = (self._page_size - 1 - -length % self._page_size)[longest_first]
        self.own_pages = int(own.sum())

    def peak_pages(self) -> int:
        """The most pages that they will own together."""
        if not len(self._to_come):
            return 0
        growing = np.arange(1, len(self._to_come) + 1) * self._to_come
        return int((self._own.cumsum() + (growing + self._rounding.cumsum()) // self._page_size).max())


def _inserted(column: Column, place: int, value: int) -> Column:
    return np.concatenate([column[:place], [value], column[place:]])

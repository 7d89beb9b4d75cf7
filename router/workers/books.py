"""What one worker has to do, from two sources: this router's own bookings, and the worker's reports.

Own bookings count at once. A report counts them too, but late: it was taken a moment ago, so a request sent since may
not be in it, and one that ended since may still be. With R the prompt tokens that the report gives as not computed yet:

    foreign  = max(0, R - all that may be in it)     all own bookings, and those ended within SETTLING_S
    progress = max(0, all that must be in it - R)    own bookings older than SETTLING_S

`foreign` is the work of others: another router, a client that calls the worker directly. It is no more than R times
their share of the reported requests, so none when there are none: a worker counts a prompt that waits for a prefix
which another is computing in full, and we do not, for it will find it cached. `progress` is the part of our
own prompts that was computed before their first token. Until the next report both stand, and

    outstanding = own bookings - progress + foreign

A booking that gets its first token takes its tokens away, and as much progress: the oldest prompts are computed first.
Where several routers watch a worker, its reports also say what it has accepted, as of the moment in which they were
sent: that counts others' requests as we count ours, so what it has beyond ours, and those ended within ON_THE_WAY_S, is
foreign. One of ours that is on its way then hides as much of theirs, until it is accepted, which is told at once.

Nothing is counted twice, and nothing goes below zero. Requests are counted in the same way. On the event loop only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from radixfleet.clock import Clock
from radixfleet.types import AcceptedLoad, Load

ON_THE_WAY_S = 0.05
"""What has ended here may so long after still be counted by an update that comes: both were on their way together."""
SETTLING_S = 0.5
"""A worker reports about every 0.1 s, from numbers that its engine sends every 0.05 s; the rest is slack."""


@dataclass(slots=True, eq=False)
class Booking:
    """One request on one worker. Changed by `Books` alone."""

    tokens: int
    """Uncached prompt tokens that the worker has to compute; 0 after the first token."""
    booked_at_s: float


class _Ended(NamedTuple):
    """What left the books lately."""

    at_s: float
    tokens: int
    requests: int


class Books:
    """The accounts of one worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Oldest first: a dict keeps its order.
        self._open: dict[Booking, None] = {}
        self._ended: deque[_Ended] = deque()
        self._own_tokens = 0
        self._progress_tokens = 0
        self._foreign_tokens = 0
        self._foreign_requests = 0
        self.reported = Load()
        """The worker's last report."""

    @property
    def own_requests(self) -> int:
        """Requests booked by this router and not ended."""
        return len(self._open)

    @property
    def own_tokens(self) -> int:
        """Uncached prompt tokens booked by this router whose request has no first token yet."""
        return self._own_tokens

    @property
    def running_requests(self) -> int:
        """Requests on the worker, whoever sent them."""
        return len(self._open) + self._foreign_requests

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens that the worker has still to compute, whoever sent them."""
        return self._own_tokens - self._progress_tokens + self._foreign_tokens

    def book(self, tokens: int) -> Booking:
        """A request of `tokens` uncached prompt tokens is on its way to the worker."""
        booking = Booking(tokens, self._clock.now())
        self._open[booking] = None
        self._own_tokens += tokens
        return booking

    def revise(self, booking: Booking, tokens: int) -> None:
        """The worker said how much it really has to compute."""
        assert booking in self._open, "the booking is closed"
        self._own_tokens += tokens - booking.tokens
        booking.tokens = tokens
        self._progress_tokens = min(self._progress_tokens, self._own_tokens)

    def computed(self, booking: Booking) -> None:
        """The request's prompt is computed: its first token is there."""
        assert booking in self._open, "the booking is closed"
        self._end(booking, requests=0)

    def close(self, booking: Booking) -> None:
        """The request ended, however it did."""
        assert booking in self._open, "the booking is closed"
        self._end(booking, requests=1)
        del self._open[booking]

    def report(self, load: Load, accepted: AcceptedLoad | None = None, *, is_between_reports: bool = False) -> None:
        """The worker's own account of its load. `accepted`: where it tells that, to several routers.

        `is_between_reports`: `load` is what the last report said. Then the progress stays what it was: an engine that
        hangs says nothing new, and our bookings that have settled since are not computed because it never knew them.
        """
        self.reported = load
        now_s = self._clock.now()
        settled_before_s = now_s - SETTLING_S
        while self._ended and self._ended[0].at_s <= settled_before_s:
            self._ended.popleft()
        if not is_between_reports:
            certain_tokens = self._tokens_booked_until(settled_before_s)
            self._progress_tokens = max(0, certain_tokens - load.outstanding_prompt_tokens)
        if accepted is None:
            self._foreign_by_load(load, settled_before_s)
        else:
            self._foreign_by_accepted(accepted, now_s - ON_THE_WAY_S)

    def forget_reports(self) -> None:
        """The worker restarted or is out of reach: only own bookings are known."""
        self.reported = Load()
        self._progress_tokens = self._foreign_tokens = self._foreign_requests = 0
        self._ended.clear()

    def _tokens_booked_until(self, at_s: float) -> int:
        """Tokens of own bookings that were made by `at_s`."""
        tokens = self._own_tokens
        for booking in reversed(self._open):
            if booking.booked_at_s <= at_s:
                break
            tokens -= booking.tokens
        return tokens

    def _foreign_by_load(self, load: Load, since_s: float) -> None:
        """What the engine has beyond ours is foreign."""
        requests, tokens = self._ours_since(since_s)
        reported_requests = load.running_requests + load.waiting_requests
        self._foreign_requests = max(0, reported_requests - requests)
        beyond_ours = max(0, load.outstanding_prompt_tokens - tokens)
        theirs = load.outstanding_prompt_tokens * self._foreign_requests // max(1, reported_requests)
        self._foreign_tokens = min(beyond_ours, theirs)

    def _foreign_by_accepted(self, accepted: AcceptedLoad, since_s: float) -> None:
        """What the worker has accepted beyond ours is foreign."""
        requests, tokens = self._ours_since(since_s)
        self._foreign_requests = max(0, accepted.requests - requests)
        self._foreign_tokens = max(0, accepted.prompt_tokens - tokens)

    def _ours_since(self, since_s: float) -> tuple[int, int]:
        """(requests, tokens) of ours that a report may count: what is booked, and what has ended since then."""
        requests, tokens = len(self._open), self._own_tokens
        for ended in reversed(self._ended):
            if ended.at_s <= since_s:
                break
            requests, tokens = requests + ended.requests, tokens + ended.tokens
        return requests, tokens

    def _end(self, booking: Booking, *, requests: int) -> None:
        """Take the booking's tokens away, and remember that a report may still count them."""
        self._own_tokens -= booking.tokens
        self._progress_tokens = max(0, self._progress_tokens - booking.tokens)
        if booking.tokens or requests:
            self._ended.append(_Ended(self._clock.now(), booking.tokens, requests))
        booking.tokens = 0

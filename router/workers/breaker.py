"""Circuit breaker of one worker. On the event loop only.

    CLOSED --- `failures` in a row ---> OPEN --- `open_s` later ---> HALF-OPEN --- probe answered ---> CLOSED
                                          ^                              |
                                          +------- probe failed ---------+

A failure is one of the transport, of a worker that never answered, or of one that did not answer rightly (status 500)
what another worker then answered: a request that no worker answers is no fault of theirs. What the client did wrong is
an answer, and a success here. HALF-OPEN lets one request through at a time.
"""

from __future__ import annotations

from enum import StrEnum

from radixfleet.clock import Clock


class BreakerState(StrEnum):
    """See the drawing above."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Each `acquire` is followed by exactly one of `success`, `failure` and `neither`: a lease sees to that.

    A connection that breaks fails every request on it at once. Those count as one failure: a request that was
    sent before the last failure says nothing new.
    """

    def __init__(self, *, failures: int, open_s: float, clock: Clock) -> None:
        self._limit = failures
        self._open_s = open_s
        self._clock = clock
        self._failed_in_row = 0
        self._failed_at_s = float("-inf")
        self._opened_at_s: float | None = None
        self._probing = False
        self.num_opened = 0
        """How often it opened, a failed probe included."""

    @property
    def is_closed(self) -> bool:
        """Nothing is held against the worker."""
        return self._opened_at_s is None

    @property
    def state(self) -> BreakerState:
        """Where the breaker stands now."""
        if self._opened_at_s is None:
            return BreakerState.CLOSED
        if self._clock.now() - self._opened_at_s < self._open_s:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether a request may go to the worker now."""
        return self.is_closed or (self.state is BreakerState.HALF_OPEN and not self._probing)

    def acquire(self) -> bool:
        """A request goes to the worker. True: it is the probe; hand that back with its outcome."""
        assert self.admits, "the breaker admits no request"
        self._probing = not self.is_closed
        return self._probing

    def success(self, *, probe: bool) -> None:
        """The worker answered. While the breaker is not closed, only the probe's answer closes it."""
        if self._opened_at_s is None or (probe and self._probing):
            self.reset()

    def failure(self, *, sent_at_s: float, probe: bool) -> None:
        """The worker could not be reached, or did not answer a request sent at `sent_at_s`."""
        if probe and self._probing:
            self._probing = False
            self._open()
        if sent_at_s < self._failed_at_s:
            return
        self._failed_at_s = self._clock.now()
        self._failed_in_row += 1
        is_half_open = self.state is BreakerState.HALF_OPEN
        if is_half_open or (self._opened_at_s is None and self._failed_in_row >= self._limit):
            self._open()

    def neither(self, *, probe: bool) -> None:
        """The request ended before it could tell (the client left, say)."""
        if probe:
            self._probing = False

    def reset(self) -> None:
        """Close: the worker answered, or its engine is a new one."""
        self._failed_in_row = 0
        self._failed_at_s = float("-inf")
        self._opened_at_s = None
        self._probing = False

    def _open(self) -> None:
        self._opened_at_s = self._clock.now()
        self.num_opened += 1

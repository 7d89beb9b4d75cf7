"""When a failed call is worth another try, and after how long."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from radixfleet.clock import Clock
from radixfleet.errors import Cancelled, DeadlineExceeded, Overloaded, RadixfleetError, Unavailable, Unreachable

_LOOK_EVERY_S = 1.0
"""Longest wait between two tries while a server that is gone is expected back."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Tries again what another moment may cure: UNAVAILABLE and RESOURCE_EXHAUSTED, and nothing else.

    The wait is what the server asked for (RetryInfo), or else doubles from `first_s` to `longest_s`; up to a quarter is
    added at random, so that clients refused together do not return together.
    """

    retries: int = 2
    """Tries after the first."""
    first_s: float = 0.1
    longest_s: float = 5.0
    reconnect_s: float = 20.0
    """How long calls go on trying to reach a server that has answered before and is gone: a restart takes some seconds.
    Without effect where `retries` is 0."""

    def delay_s(
        self, error: RadixfleetError, retry: int, left_s: float | None, random: Random, *, gone_s: float | None = None
    ) -> float | None:
        """Seconds to wait before try number `retry` (0 is the first retry); None: give up.

        `left_s`: seconds left to the deadline; None is returned when the wait would outlast it. `gone_s`: seconds since
        a server that had answered before was last there; None: it is there, or never was.
        """
        if not isinstance(error, Unavailable | Overloaded):
            return None
        is_awaited = gone_s is not None and gone_s < self.reconnect_s and self.retries > 0
        if retry >= self.retries and not is_awaited:
            return None
        asked = error.retry_after_s
        longest_s = min(self.longest_s, _LOOK_EVERY_S) if is_awaited else self.longest_s
        wait = asked if asked is not None else min(self.first_s * 2**retry, longest_s)
        wait *= 1 + random.random() / 4
        return None if left_s is not None and wait >= left_s else wait


@dataclass(slots=True)
class Contact:
    """What a client knows of its server, over all calls."""

    has_answered: bool = False
    """It has answered, and no call has waited `reconnect_s` in vain since: only one call waits for a server that is
    gone for good."""


class Tries:
    """The tries of one call. Tries that found no server do not count against `RetryPolicy.retries`, refused ones do."""

    def __init__(self, policy: RetryPolicy, contact: Contact, clock: Clock, random: Random) -> None:
        self._policy = policy
        self._contact = contact
        self._clock = clock
        self._random = random
        self._refused = 0
        self._missed = 0
        """Tries in a row that found no server, the first at `_gone_since_s`."""
        self._gone_since_s = 0.0

    def delay_s(self, error: RadixfleetError, left_s: float | None) -> float | None:
        """Seconds to wait after a try that failed with `error`; None: give up. See `RetryPolicy.delay_s`."""
        if isinstance(error, DeadlineExceeded | Cancelled):  # which nobody need have sent
            return None
        if isinstance(error, Unreachable):
            return self._delay_of_missing_s(error, left_s)
        self._contact.has_answered = True  # a refusal is an answer
        self._missed = 0
        self._refused += 1
        return self._policy.delay_s(error, self._refused - 1, left_s, self._random)

    def _delay_of_missing_s(self, error: Unreachable, left_s: float | None) -> float | None:
        now_s = self._clock.now()
        if not self._missed:
            self._gone_since_s = now_s
        self._missed += 1
        gone_s = now_s - self._gone_since_s if self._contact.has_answered else None
        if gone_s is not None and gone_s >= self._policy.reconnect_s:
            self._contact.has_answered = False
        return self._policy.delay_s(error, self._missed - 1, left_s, self._random, gone_s=gone_s)

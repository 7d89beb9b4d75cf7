"""When a failed call is worth another try, and after how long."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from radixfleet.clock import Clock
from radixfleet.errors import Cancelled, DeadlineExceeded, Overloaded, RadixfleetError, Unavailable, Unreachable

_LOOK_EVERY_S = 1.0
"""For a server that is awaited."""


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
    """How long a server that has answered before and is gone is tried again, unless there are no retries at all: one
    that is started again takes some seconds."""

    def delay_s(
        self, error: RadixfleetError, retry: int, left_s: float | None, random: Random, *, gone_s: float | None = None
    ) -> float | None:
        """Seconds to wait before try number `retry` (0 is the first retry); None: give up.

        `left_s`: what is left to the deadline; a wait that outlasts it is no use. `gone_s`: how long nothing has
        answered where something did before; None: it answers, or never did.
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
    """What a client has heard of its server."""

    has_answered: bool = False
    """And was not awaited in vain since: one that is gone for good is awaited once."""


class Tries:
    """The tries of one call. Those in which nothing was there do not use up those that may be refused."""

    def __init__(self, policy: RetryPolicy, contact: Contact, clock: Clock, random: Random) -> None:
        self._policy = policy
        self._contact = contact
        self._clock = clock
        self._random = random
        self._refused = 0
        self._missed = 0
        """In a row, since `_gone_since_s`."""
        self._gone_since_s = 0.0

    def delay_s(self, error: RadixfleetError, left_s: float | None) -> float | None:
        """After a try that failed with `error`; the rest as for `RetryPolicy.delay_s`."""
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

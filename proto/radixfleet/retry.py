"""When a failed call is worth another try, and after how long."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from radixfleet.clock import Clock
from radixfleet.errors import Overloaded, RadixfleetError, Unavailable, Unreachable

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


class Contact:
    """What a client has heard of its server."""

    def __init__(self) -> None:
        self._has_answered = False
        self._gone_since_s: float | None = None

    def heard(self) -> None:
        """It answered."""
        self._has_answered, self._gone_since_s = True, None

    def gone_s(self, error: RadixfleetError, clock: Clock) -> float | None:
        """After a call that failed: how long it has been gone; see `RetryPolicy.delay_s`."""
        if not isinstance(error, Unreachable):
            self.heard()  # a refusal is an answer
            return None
        if not self._has_answered:
            return None
        now_s = clock.now()
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        return now_s - self._gone_since_s

"""When a failed call is worth another try, and after how long."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from radixfleet.errors import Overloaded, RadixfleetError, Unavailable


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

    def delay_s(self, error: RadixfleetError, retry: int, left_s: float | None, random: Random) -> float | None:
        """Seconds to wait before try number `retry` (0 is the first retry); None: give up.

        `left_s`: what is left to the deadline; a wait that outlasts it is no use.
        """
        if retry >= self.retries or not isinstance(error, Unavailable | Overloaded):
            return None
        asked = error.retry_after_s
        wait = asked if asked is not None else min(self.first_s * 2**retry, self.longest_s)
        wait *= 1 + random.random() / 4
        return None if left_s is not None and wait >= left_s else wait

"""The one deadline that a client keeps over all tries of a call, and what is said when it passes."""

from __future__ import annotations

from dataclasses import dataclass

from radixfleet.clock import Clock
from radixfleet.counts import counted
from radixfleet.errors import DeadlineExceeded, RadixfleetError
from radixfleet.status import DEADLINE_PASSED


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time by which a call must end: `timeout_s` after the deadline was made. None: there is none."""

    timeout_s: float | None
    at_s: float
    """The time by the clock; 0 without a timeout."""

    @classmethod
    def after(cls, timeout_s: float | None, clock: Clock) -> Deadline:
        """The deadline `timeout_s` from now."""
        return cls(timeout_s, 0.0 if timeout_s is None else clock.now() + timeout_s)

    def left_s(self, clock: Clock) -> float | None:
        """Seconds left; below zero when the deadline has passed. None: there is no deadline."""
        return None if self.timeout_s is None else self.at_s - clock.now()

    def for_try_s(self, clock: Clock) -> float | None:
        """Timeout for another try: the seconds left. Raises DeadlineExceeded when there are none."""
        left_s = self.left_s(clock)
        if left_s is not None and left_s <= 0:
            raise self.named(DeadlineExceeded("it passed before the request could be sent"))
        return left_s

    def named(self, error: RadixfleetError, delivered_tokens: int | None = None) -> RadixfleetError:
        """`error`; a DeadlineExceeded gets a message with the timeout, how far the answer got, and what to do.

        The server cannot say this, because only the client knows its timeout. `delivered_tokens`: None while the answer
        has not begun.
        """
        if not isinstance(error, DeadlineExceeded) or self.timeout_s is None:
            return error
        limit = f"the client's timeout of {self.timeout_s:g} s"
        if delivered_tokens is None:
            detail = "" if str(error) == DEADLINE_PASSED else f" ({error})"
            text = f"no answer within {limit}{detail}: more time may help, or asking for less"
        else:
            text = (
                f"{limit} ended the answer after {counted(delivered_tokens, 'token')}: "
                "more time may help, or asking for fewer tokens"
            )
            error.metadata["delivered_tokens"] = str(delivered_tokens)
        named = DeadlineExceeded(text, retry_after_s=error.retry_after_s)
        named.metadata = error.metadata
        return named

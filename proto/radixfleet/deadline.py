"""The one deadline that a client keeps over all tries of a call, and what is said when it passes."""

from __future__ import annotations

from dataclasses import dataclass

from radixfleet.clock import Clock
from radixfleet.counts import counted
from radixfleet.errors import DeadlineExceeded, RadixfleetError
from radixfleet.status import DEADLINE_PASSED


@dataclass(frozen=True, slots=True)
class Deadline:
    """`timeout_s` after it was made; None: never."""

    timeout_s: float | None
    at_s: float
    """By the clock; without meaning where there is no timeout."""

    @classmethod
    def after(cls, timeout_s: float | None, clock: Clock) -> Deadline:
        """From now on."""
        return cls(timeout_s, 0.0 if timeout_s is None else clock.now() + timeout_s)

    def left_s(self, clock: Clock) -> float | None:
        """What a wait may take; below zero when it is too late. None: for ever."""
        return None if self.timeout_s is None else self.at_s - clock.now()

    def for_try_s(self, clock: Clock) -> float | None:
        """What one more try may take. Raises DeadlineExceeded when nothing is left."""
        left_s = self.left_s(clock)
        if left_s is not None and left_s <= 0:
            raise self.named(DeadlineExceeded("it passed before the request could be sent"))
        return left_s

    def named(self, error: RadixfleetError, delivered_tokens: int | None = None) -> RadixfleetError:
        """`error`, but one that tells that a deadline passed names the timeout, how far the answer got, what to do.

        `delivered_tokens`: None while the answer has not begun. Only the client knows its own timeout.
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

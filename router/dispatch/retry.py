"""How many requests may be tried again, in all, and how often one."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.workers.state import WorkerState

HEADWAY_TOKENS = 16
"""A resumption that got so far was worth it: what ended it was hardly the request itself."""

_BURST = 10.0


@dataclass(slots=True)
class Failures:
    """What one request has been through."""

    workers: list[WorkerState] = field(default_factory=list)
    """Not to be asked again: those that failed since the last token, the one that made it among them."""
    suspects: list[WorkerState] = field(default_factory=list)
    """They answered, but not rightly, and nobody has answered the request since."""
    in_vain: int = 0
    """Resumptions in a row that were lost before they had made `HEADWAY_TOKENS`."""

    def add(self, worker: WorkerState, num_tokens: int, *, was_resumed: bool) -> None:
        """A try on `worker` failed after so many tokens; `was_resumed`: it went on with an answer begun by others."""
        if num_tokens:  # whoever failed before has had time to come back
            self.workers.clear()
        self.workers.append(worker)
        if num_tokens >= HEADWAY_TOKENS:
            self.in_vain = 0
        elif was_resumed:
            self.in_vain += 1


class RetryBudget:
    """For retries that nobody asked for; answers that are resumed are no matter of it.

    A retry costs 1; each request earns `ratio`, up to a burst of 10, which is also what there is at the start.

    When every worker fails, retries add `ratio` to the load in the long run, and not another load of the same size.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._saved = _BURST if ratio else 0.0

    def earn(self) -> None:
        """A new request came in."""
        self._saved = min(self._saved + self._ratio, _BURST)

    def spend(self) -> bool:
        """Take one retry; False when the budget is spent."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def give_back(self) -> None:
        """The retry that was taken last cannot be made: there is no other worker."""
        self._saved += 1.0

"""How large a step may be: as large as planned, until the device runs out of memory in one.

A step is as large as its chunks (prompt tokens in pieces longer than one token) and its sequences. A step that failed
halves what it failed by: its chunks, while it has any, else its sequences; in sampling first its sequences, because
only those are sampled. The limit is halved from the size of the step that failed, not from the limit, so that a small
step which fails counts, and two steps of one size that were both launched halve it once.

A limit grows again, doubling, after `_PATIENCE` clean steps that came near it, or many more that did not: such a step
proves little. A limit that had to be halved soon after it grew waits twice as long the next time, so a shortage that
lasts costs a failed step now and then, and one that passed is forgotten soon.

Pure; used by the scheduler alone.
"""

from __future__ import annotations

_PATIENCE = 8
_MOST_PATIENCE = 256
_FAR = 16
"""Clean steps far below a limit that count as one near it."""


class StepLimit:
    """One of the two sizes of a step."""

    def __init__(self, full: int) -> None:
        self.full = full
        """As planned at start."""
        self.now = full
        """At most `full`, at least 1."""
        self._clean = 0
        self._patience = _PATIENCE
        self._has_grown = False
        """Since it was last halved; not proven yet."""

    @property
    def is_full(self) -> bool:
        """No shortage is remembered."""
        return self.now == self.full

    def failed(self, size: int) -> None:
        """A step of `size` (2 or more) ran out of memory."""
        if self._has_grown:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self.now = max(1, min(self.now, size // 2))
        self._clean = 0
        self._has_grown = False

    def passed(self, size: int) -> None:
        """A step of `size` was computed."""
        if self.is_full and not self._has_grown:
            return
        self._clean += _FAR if 2 * size > self.now else 1
        if self._clean < _FAR * self._patience:
            return
        self._clean = 0
        if self.is_full:
            self._has_grown = False
            self._patience = _PATIENCE
        else:
            self.now = min(2 * self.now, self.full)
            self._has_grown = True


class StepSize:
    """Both limits, and how they answer to what became of steps."""

    def __init__(self, max_prompt_tokens: int, max_sequences: int) -> None:
        self.prompt_tokens = StepLimit(max_prompt_tokens)
        self.sequences = StepLimit(max_sequences)

    @property
    def is_full(self) -> bool:
        """Both limits are."""
        return self.prompt_tokens.is_full and self.sequences.is_full

    def ran_out(self, num_tokens: int, num_sequences: int, *, in_sampling: bool) -> bool:
        """A step ran out of memory. False: no smaller one can be made, it was one token of one sequence."""
        chunks = num_tokens - num_sequences + 1
        if num_sequences > 1 and (in_sampling or chunks == 1):
            self.sequences.failed(num_sequences)
        elif chunks > 1:
            self.prompt_tokens.failed(chunks)
        else:
            return False
        return True

    def passed(self, num_tokens: int, num_sequences: int) -> None:
        """A step was computed."""
        self.prompt_tokens.passed(num_tokens - num_sequences + 1)
        self.sequences.passed(num_sequences)

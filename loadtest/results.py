"""What a run of a workload gave: an outcome for each request, and the times between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Outcome:
    """One request. Times are seconds since the workload's start."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    ceiling_tokens: int
    """Prompt tokens that an earlier request had too."""
    worker: int = -1
    """Number of the worker that it was last sent to; -1: it was sent to none."""
    reason: str = ""
    """Why the router chose that worker."""
    tries: int = 0
    """Workers that it was sent to, one after the other. 0: none, or the server does not tell."""
    reachable_tokens: int = 0
    """Thought to be cached on the eligible worker that holds most of the prompt."""
    predicted_tokens: int = 0
    """Thought to be cached on the chosen worker."""
    cached_tokens: int = 0
    """Found in its cache by the worker."""
    started_s: float | None = None
    """When the worker began to compute it."""
    first_token_s: float | None = None
    ended_s: float | None = None
    error: str = ""
    """Why it failed; empty when it did not."""

    @property
    def is_complete(self) -> bool:
        """It was answered to the end."""
        return self.ended_s is not None and not self.error


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """One workload under one policy."""

    policy: str
    num_workers: int
    duration_s: float
    """From the start to the end of the last request."""
    outcomes: Sequence[Outcome]
    """In order of arrival."""
    gaps_s: FloatArray
    """Times between two tokens of a request, ..."""
    gap_tokens: npt.NDArray[np.int64]
    """... and how many tokens came after each."""
    busy_s: Sequence[float]
    """Of each worker: time in which it computed. Empty: not known."""

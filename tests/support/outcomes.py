"""Results of runs, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.results import Outcome, RunResult


def outcome(arrived_s: float = 0.0, **fields: Any) -> Outcome:
    """A request that was answered: begun after 0.1 s, first token after 0.5 s, 10 more tokens in a second."""
    values: dict[str, Any] = {
        "prompt_tokens": 100,
        "output_tokens": 11,
        "ceiling_tokens": 80,
        "worker": 0,
        "reason": "prefix",
        "tries": 1,
        "reachable_tokens": 70,
        "predicted_tokens": 60,
        "cached_tokens": 50,
        "started_s": arrived_s + 0.1,
        "first_token_s": arrived_s + 0.5,
        "ended_s": arrived_s + 1.5,
    }
    return Outcome(arrived_s, **(values | fields))


def failed(arrived_s: float = 0.0, **fields: Any) -> Outcome:
    """A request that nobody began."""
    nothing: dict[str, Any] = {"worker": -1, "tries": 0, "started_s": None, "first_token_s": None}
    return outcome(arrived_s, **({"error": "nobody serves"} | nothing | fields))


def result(outcomes: Sequence[Outcome], *, policy: str = "p", gaps: Sequence[tuple[float, int]] = ()) -> RunResult:
    """A run of two workers that lasted until the last request ended; they computed all the time."""
    duration_s = max((each.ended_s or 0.0 for each in outcomes), default=0.0)
    return RunResult(
        policy=policy,
        num_workers=2,
        duration_s=duration_s,
        outcomes=outcomes,
        gaps_s=np.array([seconds for seconds, _ in gaps]),
        gap_tokens=np.array([tokens for _, tokens in gaps], dtype=np.int64),
        busy_s=[duration_s] * 2,
    )

"""Sampling in the plainest form: one row, float64, sorted lists. What the fast one is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def distribution(
    logits: npt.NDArray[np.float64], *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.float64]:
    """Probability of each token, float64 [vocab]: top_k, then top_p of what is left, then min_p; ties are kept."""
    scores = (logits - logits.max()) / temperature
    kept = set(range(len(scores)))
    if 0 < top_k < len(scores):
        last = sorted(scores, reverse=True)[top_k - 1]
        kept = {token for token in kept if scores[token] >= last}
    if top_p < 1:
        total = sum(math.exp(scores[token]) for token in kept)
        mass, last = 0.0, 0.0
        for token in sorted(kept, key=lambda token: -scores[token]):
            mass, last = mass + math.exp(scores[token]) / total, scores[token]
            if mass >= top_p:
                break
        kept = {token for token in kept if scores[token] >= last}
    if min_p > 0:
        kept = {token for token in kept if math.exp(scores[token]) >= min_p}
    weights = np.array([math.exp(scores[token]) if token in kept else 0.0 for token in range(len(scores))])
    return weights / weights.sum()


def penalized(
    logits: npt.NDArray[np.float64],
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Logits float64 [vocab] after the three penalties: token by token, occurrence by occurrence."""
    changed = logits.copy()
    for token in set(prompt) | set(answer):
        changed[token] = changed[token] / repetition if changed[token] > 0 else changed[token] * repetition
    for token in answer:
        changed[token] -= frequency
    for token in set(answer):
        changed[token] -= presence
    return changed


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Float64 [vocab]."""
    shifted = logits - logits.max()
    result: npt.NDArray[np.float64] = shifted - math.log(sum(math.exp(value) for value in shifted))
    return result

"""Draws the next token of each row of a step.

    1. tokens that a row must not give are masked (end-of-sequence below min_new_tokens)
    2. the likeliest token of every row: the answer of greedy rows, and NaN where the row's logits hold one
    3. rows with a temperature: scores, filters, cumulated probabilities in vocabulary order, and the first token whose
       sum exceeds u * total, with one uniform number u of (seed, position) a row (the distribution function, inverted)

Cumulating in float64 keeps the error of a vocabulary's 10^5 additions below that of the float32 logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.sampling.counter_random import uniform
from worker.sampling.filters import keep_likely


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the rows of one step, on the host. All arrays have one entry a row."""

    temperature: npt.NDArray[np.float32]
    """0 is greedy."""
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    """Position of the token that is drawn, from the beginning of the prompt."""
    banned: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(row, token ids) that the row must not give."""


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Token ids int64 [n] and failed bool [n], on the device of the logits float32 [n, vocab].

    A row has failed when its logits hold a NaN or +inf, or nothing but -inf; its token is then 0. Writes into `logits`.
    """
    for row, token_ids in batch.banned:
        logits[row, list(token_ids)] = -torch.inf
    largest, tokens = logits.max(dim=1)  # max carries NaN on
    failed = ~torch.isfinite(largest)
    drawing = np.flatnonzero(batch.temperature > 0)
    if len(drawing):
        rows = torch.from_numpy(drawing).to(logits.device)
        tokens[rows] = _draw(logits[rows], largest[rows], batch, drawing)
    return tokens.masked_fill_(failed, 0), failed


def _draw(logits: Tensor, largest: Tensor, batch: SamplingBatch, drawing: npt.NDArray[np.intp]) -> Tensor:
    device = logits.device

    def parameter(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values[drawing]).to(device)

    # Subtracting first keeps the likeliest token at 0, however small the temperature is.
    scores = (logits - largest[:, None]) / parameter(batch.temperature)[:, None]
    scores = keep_likely(scores, parameter(batch.top_k), parameter(batch.top_p), parameter(batch.min_p))
    sums = scores.double().exp().cumsum(1)
    totals = sums[:, -1:]
    drawn = torch.from_numpy(uniform(batch.seeds[drawing], batch.positions[drawing])).to(device)[:, None]
    targets = torch.minimum(drawn * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    # The first token whose sum exceeds the target: its own probability is above 0. Failed rows point past the end.
    return torch.searchsorted(sums, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)

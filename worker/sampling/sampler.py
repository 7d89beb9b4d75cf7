"""Draws the next token of each row of a step.

    1. tokens that a row must not give are masked (end-of-sequence below min_new_tokens)
    2. the likeliest token of every row: the answer of greedy rows, and NaN where the row's logits hold one
    3. rows with a temperature: scores, filters, and the token whose score and noise are the largest together (`noise`)

Which rows ask for what is known on the host, so nothing here waits for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.memory.transfers import upload, upload_indices
from worker.sampling.filters import keep_likely
from worker.sampling.noise import noise, streams


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
    _ban(logits, batch.banned)
    largest, tokens = _likeliest(logits)
    failed = ~torch.isfinite(largest)
    drawing = np.flatnonzero(batch.temperature > 0)
    if len(drawing):
        rows = upload_indices(drawing, logits.device)
        tokens[rows] = _draw(logits[rows], largest[rows], batch, drawing)
    return tokens.masked_fill_(failed, 0), failed


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, which is NaN where the row holds one, and the first token that has it."""
    if logits.device.type != "cpu":
        largest, tokens = logits.max(dim=1)
        return largest, tokens
    # torch's max with indices is scalar code on a CPU: 10 times the time of numpy's (2.8 ms against 0.25 for 32 rows).
    tokens = torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.gather(1, tokens[:, None]).squeeze(1), tokens


def _ban(logits: Tensor, banned: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
    if not banned:
        return
    rows = np.repeat([row for row, _ in banned], [len(token_ids) for _, token_ids in banned])
    tokens = np.concatenate([token_ids for _, token_ids in banned])
    nothing = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
    logits.index_put_((upload_indices(rows, logits.device), upload_indices(tokens, logits.device)), nothing)


def _draw(logits: Tensor, largest: Tensor, batch: SamplingBatch, drawing: npt.NDArray[np.intp]) -> Tensor:
    device = logits.device
    # Subtracting first keeps the likeliest token at 0, however small the temperature is.
    scores = (logits - largest[:, None]) / upload(batch.temperature[drawing], device)[:, None]
    scores = keep_likely(scores, batch.top_k[drawing], batch.top_p[drawing], batch.min_p[drawing])
    rows = upload(streams(batch.seeds[drawing], batch.positions[drawing]), device)
    return noise(rows, logits.shape[1]).add_(scores).argmax(dim=1)

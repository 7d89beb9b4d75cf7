"""Penalties for tokens that came already, from counts that the runner keeps on its device.

    occurrences [rows, vocab] int32     times that a row's answer has a token, plus _IN_PROMPT where its prompt has it

A row is filled when a request takes it, from the tokens that there are so far (so also after a retraction), and each
sampled token is counted by the step that samples it. The next step, which may have been planned before, so sees it: the
penalties never lag behind, overlapped or not.

    logit > 0: logit / repetition      once for each token in prompt or answer (Keskar et al., CTRL, 2019)
    logit < 0: logit * repetition
    then logit - frequency * times - presence * (times > 0), of tokens in the answer
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.memory.transfers import upload, upload_indices

_IN_PROMPT = 1 << 30


class Occurrences:
    """Which tokens each row has had. Only rows that are penalized are kept up to date."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros((max_rows, vocab_size), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._counts.nbytes

    def start(self, row: int, prompt: npt.NDArray[np.int32], answer: npt.NDArray[np.int32]) -> None:
        """A request takes `row` with the tokens that it has so far, all of them in the vocabulary."""
        counts = self._counts[row]
        counts.zero_()
        for tokens, value in ((prompt, _IN_PROMPT), (answer, 0)):
            ids, times = np.unique(tokens, return_counts=True)
            amounts = np.full(len(ids), value) if value else times
            counts[upload_indices(ids, counts.device)] += upload(amounts.astype(np.int32), counts.device)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Each of `rows` got one more token; both int64 [n], no row twice."""
        self._counts[rows, tokens] += 1

    def penalize(
        self, logits: Tensor, rows: Tensor, *, repetition: Tensor, frequency: Tensor, presence: Tensor
    ) -> Tensor:
        """The logits [n, vocab] of `rows` int64 [n] with their penalties, float32 [n] each. Changes `logits`."""
        if logits.device.type != "cpu":
            of_rows = repetition[:, None], frequency[:, None], presence[:, None]
            return _penalized(logits, self._counts[rows], *of_rows)
        # Few tokens of a vocabulary have come: to look for them takes a tenth of what it takes to penalize all.
        for index, row in enumerate(rows.tolist()):
            counts = self._counts[row]
            came = torch.from_numpy(np.flatnonzero(counts.numpy() != 0))
            of_row = repetition[index], frequency[index], presence[index]
            logits[index, came] = _penalized(logits[index, came], counts[came], *of_row)
        return logits


def _penalized(logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    factors = torch.where(logits > 0, repetition.reciprocal(), repetition)
    penalized = logits * factors.masked_fill_(counts == 0, 1.0)
    times = counts.bitwise_and(_IN_PROMPT - 1)
    penalized -= presence * (times > 0)
    return penalized.sub_(times * frequency)

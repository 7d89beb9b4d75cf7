"""Log probabilities of tokens under the model: the logarithm of the softmax of its logits, changed by nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.core.logits import Logprobs
from worker.memory.transfers import download

_BLOCK = 256


class ArrivingLogprobs(NamedTuple):
    """Tensors of the host that a device may still be filling."""

    tokens: Tensor
    top_ids: Tensor
    top: Tensor

    def arrived(self, k: int) -> Logprobs:
        """With the k likeliest at most, once the device has passed what was launched after them."""
        return Logprobs(self.tokens.numpy(), self.top_ids[:, :k].numpy(), self.top[:, :k].numpy())


def logprobs_of(logits: Tensor, tokens: Tensor, k: int) -> ArrivingLogprobs:
    """Of `tokens` int64 [n] under `logits` float32 [n, vocab], and of the k likeliest tokens in their places."""
    totals = logits.logsumexp(dim=1, keepdim=True)
    chosen = (logits.gather(1, tokens[:, None]) - totals)[:, 0]
    top, top_ids = _likeliest(logits, min(k, logits.shape[1]))
    return ArrivingLogprobs(
        tokens=download(chosen), top_ids=download(top_ids.to(torch.int32)), top=download(top - totals)
    )


def _likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and where they are, the largest first; on a CPU of equal ones the lowest id first.

    There most of a row is looked at once: k blocks reach the k-th largest of the blocks' maxima, so k tokens do, and as
    a rule few more.
    """
    if logits.device.type != "cpu" or not k:
        return logits.topk(k, dim=1)
    on_host = logits.numpy()
    maxima = np.maximum.reduceat(on_host, np.arange(0, on_host.shape[1], min(_BLOCK, on_host.shape[1] // k)), axis=1)
    bounds = np.partition(maxima, -k, axis=1)[:, -k]
    top_ids = np.empty((len(on_host), k), np.int64)
    for row, bound, ids in zip(on_host, bounds, top_ids, strict=True):
        reaching = np.flatnonzero(~(row < bound))  # a NaN, too, so that there are always enough
        ids[:] = reaching[np.argsort(-row[reaching], kind="stable")[:k]]
    return torch.from_numpy(np.take_along_axis(on_host, top_ids, 1)), torch.from_numpy(top_ids)

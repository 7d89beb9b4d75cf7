"""Log probabilities of tokens under the model: the logarithm of the softmax of its logits, changed by nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from worker.core.logits import Logprobs
from worker.memory.transfers import download


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
    top, top_ids = logits.topk(min(k, logits.shape[1]), dim=1)
    return ArrivingLogprobs(
        tokens=download(chosen), top_ids=download(top_ids.to(torch.int32)), top=download(top - totals)
    )

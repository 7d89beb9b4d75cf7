"""Log probabilities of tokens under the model: the logarithm of the softmax of its logits, changed by nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.core.logits import Logprobs


def logprobs_of(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Of `tokens` int64 [n] under `logits` float32 [n, vocab], and of the k likeliest tokens in their places."""
    totals = logits.logsumexp(dim=1, keepdim=True)
    chosen = (logits.gather(1, tokens[:, None]) - totals)[:, 0]
    top, top_ids = logits.topk(min(k, logits.shape[1]), dim=1)
    return Logprobs(
        tokens=chosen.cpu().numpy(),
        top_ids=top_ids.to(torch.int32).cpu().numpy(),
        top=(top - totals).cpu().numpy(),
    )

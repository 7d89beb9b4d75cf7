"""Which tokens may be drawn: top_k, then top_p of what is left, then min_p, each as a threshold on a row's scores.

    scores       (logits - largest) / temperature: 0 for the likeliest token, below it for all others
    top_k        scores of the k likeliest tokens
    top_p        of those, renormalized, the smallest set of likeliest tokens whose probabilities sum to at least top_p
    min_p        tokens at least min_p times as likely as the likeliest: score >= log(min_p)

All three keep tokens by score alone, so tokens that tie with the last one kept are kept too, and the result does not
depend on the order in which a sort leaves equal scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NUM_CANDIDATES = 1024
"""Sorting this many is several times cheaper than sorting a vocabulary, and nearly always enough."""


def keep_likely(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scores [n, vocab] with those of excluded tokens set to -inf.

    Per row: `top_k` int64 (0 or less: all), `top_p` float in (0, 1], `min_p` float in [0, 1]. The likeliest token is
    always kept.
    """
    return _keep_min_p(_keep_top_p(_keep_top_k(scores, top_k), top_p), min_p)


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    rows = ((top_k > 0) & (top_k < scores.shape[1])).nonzero()[:, 0]
    if not len(rows):
        return scores
    k = top_k[rows]
    ordered = scores[rows].topk(int(k.max()), dim=1).values
    return _without_below(scores, rows, ordered.gather(1, (k - 1)[:, None]))


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    rows = (top_p < 1).nonzero()[:, 0]
    if not len(rows):
        return scores
    chosen = scores[rows]
    mass = top_p[rows].double() * chosen.double().exp().sum(1)
    num_candidates = min(_NUM_CANDIDATES, scores.shape[1])
    thresholds, found = _nucleus_thresholds(chosen.topk(num_candidates, dim=1).values, mass)
    for row in (~found).nonzero()[:, 0].tolist():  # a flat distribution: its nucleus is larger than the candidates
        ordered = chosen[row : row + 1].sort(dim=1, descending=True).values
        thresholds[row] = _nucleus_thresholds(ordered, mass[row : row + 1])[0][0]
    return _without_below(scores, rows, thresholds)


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    rows = (min_p > 0).nonzero()[:, 0]
    if not len(rows):
        return scores
    return _without_below(scores, rows, min_p[rows].log().to(scores.dtype)[:, None])


def _without_below(scores: Tensor, rows: Tensor, thresholds: Tensor) -> Tensor:
    """A copy in which the given rows have lost their scores below the thresholds [len(rows), 1]."""
    kept, chosen = scores.clone(), scores[rows]
    kept[rows] = chosen.masked_fill(chosen < thresholds, -torch.inf)
    return kept


def _nucleus_thresholds(ordered: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Score [n, 1] of the token with which the sum over descending scores reaches `mass`, and bool [n]: it does."""
    sums = ordered.double().exp().cumsum(1)
    reached = (sums < mass[:, None]).sum(1, keepdim=True)
    last = ordered.shape[1] - 1
    return ordered.gather(1, reached.clamp(max=last)), reached[:, 0] <= last

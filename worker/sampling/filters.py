"""Which tokens may be drawn: top_k, then top_p of what is left, then min_p, each as a threshold on a row's scores.

    scores       (logits - largest) / temperature: 0 for the likeliest token, below it for all others
    top_k        scores of the k likeliest tokens
    top_p        of those, renormalized, the smallest set of likeliest tokens whose probabilities sum to at least top_p
    min_p        tokens at least min_p times as likely as the likeliest: score >= log(min_p)

All three keep tokens by score alone, so tokens that tie with the last one kept are kept too, and the result does not
depend on the order in which a sort leaves equal scores.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.memory.transfers import upload, upload_indices
from worker.sampling.nucleus import kernel_or, nucleus_by_kernel

_NUM_CANDIDATES = 1024
"""Sorting this many is several times cheaper than sorting a vocabulary, and nearly always enough."""
_MAGNITUDE = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000


def keep_likely(
    scores: Tensor,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> Tensor:
    """Scores [n, vocab] with those of excluded tokens set to -inf.

    Per row, on the host, which so need not wait for the device to know what to launch: `top_k` (0 or less: all),
    `top_p` in (0, 1], `min_p` in [0, 1]. The likeliest token is always kept.
    """
    return _keep_min_p(_keep_top_p(_keep_top_k(scores, top_k), top_p), min_p)


def rows_are_alike(device: torch.device) -> bool:
    """No row's result depends on the others in its batch, to the bit: on GPUs with the kernel all that is summed is
    summed row by row, and what is done to single elements is done alike.
    """
    return device.type != "cpu" and kernel_or(nucleus_by_halving, device) is nucleus_by_kernel


def _keep_top_k(scores: Tensor, top_k: npt.NDArray[np.int64]) -> Tensor:
    limited = np.flatnonzero((top_k > 0) & (top_k < scores.shape[1]))
    if not len(limited):
        return scores
    k, rows = top_k[limited], upload_indices(limited, scores.device)
    ordered = scores[rows].topk(int(k.max()), dim=1).values
    return _without_below(scores, rows, ordered.gather(1, upload_indices(k - 1, scores.device)[:, None]))


def _keep_top_p(scores: Tensor, top_p: npt.NDArray[np.float64]) -> Tensor:
    limited = np.flatnonzero(top_p < 1)
    if not len(limited):
        return scores
    rows, shares = upload_indices(limited, scores.device), upload(top_p[limited], scores.device)
    if scores.device.type == "cpu":
        thresholds = nucleus_by_sorting(scores[rows], shares)
    else:
        thresholds = kernel_or(nucleus_by_halving, scores.device)(scores[rows], shares)
    return _without_below(scores, rows, thresholds)


def _keep_min_p(scores: Tensor, min_p: npt.NDArray[np.float64]) -> Tensor:
    limited = np.flatnonzero(min_p > 0)
    if not len(limited):
        return scores
    least = np.log(min_p[limited]).astype(np.float32)[:, None]
    return _without_below(scores, upload_indices(limited, scores.device), upload(least, scores.device))


def _without_below(scores: Tensor, rows: Tensor, thresholds: Tensor) -> Tensor:
    """A copy in which the given rows have lost their scores below the thresholds [len(rows), 1]."""
    kept, chosen = scores.clone(), scores[rows]
    kept[rows] = chosen.masked_fill_(chosen < thresholds, -torch.inf)
    return kept


def nucleus_by_sorting(scores: Tensor, shares: Tensor) -> Tensor:
    """Score [n, 1] of the least likely token in each row's nucleus. `shares` float64 [n]. Waits for the device."""
    mass = shares * scores.double().exp().sum(1)
    num_candidates = min(_NUM_CANDIDATES, scores.shape[1])
    thresholds, found = _reached(scores.topk(num_candidates, dim=1).values, mass)
    for row in (~found).nonzero()[:, 0].tolist():  # a flat distribution: its nucleus is larger than the candidates
        ordered = scores[row : row + 1].sort(dim=1, descending=True).values
        thresholds[row] = _reached(ordered, mass[row : row + 1])[0][0]
    return thresholds


def nucleus_by_halving(scores: Tensor, shares: Tensor) -> Tensor:
    """The same without waiting for the device, nor sorting: by halving the range in which the threshold lies. For GPUs
    where the kernel of `worker.sampling.nucleus` cannot be had, since it launches nine operations a halving.

    Scores are 0 and below, and the bits of float32 numbers of one sign are ordered as the numbers are: 31 halvings of
    the bits' range end at the very score.
    """
    weights, bits = scores.exp(), scores.neg().view(torch.int32).bitwise_and_(_MAGNITUDE)
    mass = shares[:, None] * weights.sum(1, keepdim=True, dtype=torch.float64)
    lowest = torch.zeros_like(mass, dtype=torch.int32)
    highest = torch.full_like(lowest, _INFINITY_BITS)
    for _ in range(31):
        middle = lowest + torch.div(highest - lowest, 2, rounding_mode="floor")
        is_enough = torch.where(bits <= middle, weights, 0.0).sum(1, keepdim=True, dtype=torch.float64) >= mass
        highest = torch.where(is_enough, middle, highest)
        lowest = torch.where(is_enough, lowest, (middle + 1).minimum(highest))
    return highest.view(torch.float32).neg()


def _reached(ordered: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Score [n, 1] of the token with which the sum over descending scores reaches `mass`, and bool [n]: it does."""
    sums = ordered.double().exp().cumsum(1)
    reached = (sums < mass[:, None]).sum(1, keepdim=True)
    last = ordered.shape[1] - 1
    return ordered.gather(1, reached.clamp(max=last)), reached[:, 0] <= last

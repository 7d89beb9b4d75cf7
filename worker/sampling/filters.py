"""Which tokens may be drawn: top_k, then top_p of what is left, then min_p, each as a threshold on a row's scores.

    scores       (logits - largest) / temperature: 0 for the likeliest token, below it for all others
    top_k        scores of the k likeliest tokens
    top_p        of those, renormalized, the smallest set of likeliest tokens whose probabilities sum to at least top_p
    min_p        tokens at least min_p times as likely as the likeliest: score >= log(min_p)

All three keep tokens by score alone, so tokens that tie with the last one kept are kept too, and the result does not
depend on the order in which a sort leaves equal scores. On a CPU `host_draw.thresholds` finds the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.memory.transfers import upload, upload_indices
from worker.sampling.nucleus import kernel_or, nucleus_by_kernel

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
    """No row's result depends on the others in its batch, to the bit: on a CPU rows are drawn one by one, on GPUs with
    the kernel all that is summed is summed row by row, and what is done to single elements is done alike.
    """
    return device.type == "cpu" or kernel_or(nucleus_by_halving, device) is nucleus_by_kernel


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
    return _without_below(scores, rows, kernel_or(nucleus_by_halving, scores.device)(scores[rows], shares))


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


def nucleus_by_halving(scores: Tensor, shares: Tensor) -> Tensor:
    """Score [n, 1] of the least likely token in each row's nucleus, `shares` float64 [n] of all; waits for no device.

    By halving the range in which it lies: for GPUs where the kernel of `worker.sampling.nucleus` cannot be had, since
    it launches nine operations a halving.

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

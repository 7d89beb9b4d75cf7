"""The threshold of top_p on a GPU by one kernel of our own, where there is Triton and what it compiles is right.

On torch alone it takes some 280 small operations a step (`worker.sampling.filters.nucleus_by_halving`), which cost more
than a layer of the model. A row's sums depend on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import structlog
import torch
from torch import Tensor

from worker.memory.transfers import still_computes

_log = structlog.get_logger()
_BLOCK = 2048
_WARPS = 8

Nucleus: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""scores float32 [n, vocab], 0 and below, and shares float64 [n] -> score [n, 1] of the last token of each nucleus."""


def nucleus_by_kernel(scores: Tensor, shares: Tensor) -> Tensor:
    """A `Nucleus`. Waits for nothing."""
    from worker.sampling.triton_kernels import find_thresholds  # there is no Triton but on Linux

    thresholds = torch.empty((len(scores), 1), dtype=torch.float32, device=scores.device)
    find_thresholds[(len(scores),)](
        scores, shares, thresholds, scores.stride(0), scores.shape[1], BLOCK=_BLOCK, num_warps=_WARPS
    )
    return thresholds


@cache
def kernel_or(other: Nucleus, device: torch.device, kernel: Nucleus = nucleus_by_kernel) -> Nucleus:
    """The kernel, or `other` where it cannot be compiled, fails, or keeps other tokens than `other`.

    Tries it, and so waits for the device, once a process: in the step that is measured at start. Raises
    OutOfMemoryError, which says nothing of the kernel, and RuntimeError where it has left the device unusable.
    """
    try:
        scores, shares = (each.to(device) for each in _trial())
        num_kept = [(scores >= nucleus(scores, shares)).sum(1) for nucleus in (kernel, other)]
        most_apart = int((num_kept[0] - num_kept[1]).abs().max())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # packages and compilers fail as they like
        why = str(error).partition("\n")[0]
        if not still_computes(device):
            raise RuntimeError(f"Triton's kernel of top_p has left {device} unusable: {why}. Remove triton") from error
        _log.info("top_p without a kernel of Triton: steps that draw by it are slower", why=why)
        return other
    if most_apart > 1:  # sums in another order may put one token on the other side
        _log.warning("top_p without the kernel of Triton, which keeps other tokens", most_apart=most_apart)
        return other
    return kernel


def _trial() -> tuple[Tensor, Tensor]:
    """A peaked row, an ordinary one, a flat one, and one in which most is excluded."""
    logits = torch.randn(4, 4096, generator=torch.Generator().manual_seed(1))
    logits *= torch.tensor([[9.0], [3.0], [0.1], [3.0]])
    logits[3, 20:] = -torch.inf
    return logits - logits.amax(dim=1, keepdim=True), torch.tensor([0.9, 0.95, 0.99, 0.5], dtype=torch.float64)

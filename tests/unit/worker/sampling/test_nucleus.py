"""When top_p is left to the kernel, and when not."""

from __future__ import annotations

import platform

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from worker.sampling import nucleus
from worker.sampling.filters import nucleus_by_halving
from worker.sampling.nucleus import kernel_or, nucleus_by_kernel

CPU = torch.device("cpu")


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is for Linux")
def test_a_kernel_that_keeps_the_right_tokens_is_used() -> None:
    """Triton's interpreter computes it here."""
    assert kernel_or(nucleus_by_halving, CPU) is nucleus_by_kernel


def test_a_kernel_that_fails_is_passed_by() -> None:
    def failing(scores: Tensor, shares: Tensor) -> Tensor:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    with capture_logs() as logs:
        assert kernel_or(nucleus_by_halving, CPU, failing) is nucleus_by_halving
    assert [line["why"] for line in logs] == ["Failed to find C compiler."]


def test_a_kernel_that_leaves_no_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(scores: Tensor, shares: Tensor) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(nucleus, "still_computes", lambda _device: False)
    with pytest.raises(RuntimeError, match="kernel of top_p has left cpu unusable: an illegal memory access"):
        kernel_or(nucleus_by_halving, CPU, failing)


def test_running_out_of_memory_once_says_nothing_of_the_kernel() -> None:
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def short_once(scores: Tensor, shares: Tensor) -> Tensor:
        if failures:
            raise failures.pop()
        return nucleus_by_halving(scores, shares)

    with pytest.raises(torch.OutOfMemoryError):
        kernel_or(nucleus_by_halving, CPU, short_once)
    assert kernel_or(nucleus_by_halving, CPU, short_once) is short_once


@pytest.mark.parametrize("shift", [-0.5, 0.5, float("nan")])
def test_a_kernel_that_keeps_others_is_passed_by(shift: float) -> None:
    def wrong(scores: Tensor, shares: Tensor) -> Tensor:
        return nucleus_by_halving(scores, shares) + shift

    with capture_logs() as logs:
        assert kernel_or(nucleus_by_halving, CPU, wrong) is nucleus_by_halving
    assert logs[0]["most_apart"] > 1


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    """Behaviour 30: to the bit, on GPUs as well."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(2)) * 3
    scores, shares = logits - logits.amax(1, keepdim=True), torch.linspace(0.5, 0.99, 3, dtype=torch.float64)
    together = nucleus_by_kernel(scores, shares)
    alone = [nucleus_by_kernel(scores[row : row + 1], shares[row : row + 1]) for row in range(3)]
    assert torch.equal(together, torch.cat(alone))

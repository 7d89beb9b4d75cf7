"""What `radixfleet doctor` says of a device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from deploy.doctor.inspection import _attention, _compiler, _dtype, _kernels
from worker.runner.attention import backends
from worker.runner.attention.flash import find_flash
from worker.runner.attention.trial import TrialFailed
from worker.runner.kernels.library import load_library


def _absent(name: str) -> object:
    raise ModuleNotFoundError(f"No module named {name!r}")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU as far as the choice of a backend looks at it, and no FlashAttention beside it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(backends, "find_flash", partial(find_flash, load=_absent))
    monkeypatch.setattr(backends, "try_attention", lambda *_: None)
    return torch.device("cuda")


def test_a_gpu_is_told_its_attention_and_why_no_faster_one(hopper: torch.device) -> None:
    (finding,) = _attention(None, hopper, torch.bfloat16)
    assert finding.topic == "attention"
    assert finding.fact.startswith("triton, for heads of 128 in pages of 16")
    assert "No module named" in finding.fact
    assert "pip install" in finding.advice


def test_a_gpu_on_which_nothing_works_is_told_why(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor is asked when things are broken, so it must not break itself."""

    def broken(*_: object) -> None:
        raise TrialFailed("its trial failed: RuntimeError: CUDA error: no kernel image is available")

    monkeypatch.setattr(backends, "try_attention", broken)
    (finding,) = _attention(None, hopper, torch.bfloat16)
    assert "no kernel image is available" in finding.fact
    assert "build of torch" in finding.advice


def test_on_a_cpu_the_kernels_say_it() -> None:
    assert _attention(None, torch.device("cpu"), torch.float32) == []


@pytest.mark.parametrize(("capabilities", "is_told"), [({"avx512_bf16": True}, False), ({"avx2": True}, True)])
def test_a_cpu_is_told_what_computes_and_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], is_told: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    finding = _dtype(torch.device("cpu"), torch.bfloat16, by_kernels=True)
    assert finding.fact == "bfloat16, linear layers by the kernels"
    assert ("no instructions for bfloat16" in finding.advice) == is_told
    assert _dtype(torch.device("cpu"), torch.float32, by_kernels=False).fact == "float32, linear layers by dense"


def test_why_there_are_no_kernels_is_told_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    load_library.cache_clear()
    monkeypatch.setenv("CC", "false")
    finding = _compiler(_kernels())
    assert finding.fact == "none: false failed: no message"
    assert finding.advice.startswith("set CC to a C compiler that works, or unset it: without kernels")

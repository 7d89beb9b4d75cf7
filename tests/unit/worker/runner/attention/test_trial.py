"""What a backend is asked to compute before it is chosen, by backends that do it well and by others."""

from __future__ import annotations

import platform
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tiny_model import tiny_model
from worker.model.configuration import ModelConfig, load_config
from worker.runner.attention import trial
from worker.runner.attention.fixed_shapes import FixedShapesBackend
from worker.runner.attention.protocol import AttentionBatch
from worker.runner.attention.sdpa import SdpaBackend
from worker.runner.attention.trial import DeviceLost, TrialFailed, try_attention

CPU = torch.device("cpu")


def shape(num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 16) -> ModelConfig:
    return replace(load_config(tiny_model()), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [{}, {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}], ids=["small", "8B"])
def test_backends_that_compute_attention_pass(page_size: int, dtype: torch.dtype, heads: dict[str, int]) -> None:
    config = shape(**heads)
    for backend in (SdpaBackend(config.num_kv_heads), FixedShapesBackend(config.num_kv_heads)):
        try_attention(backend, config, page_size, dtype, CPU)


class Broken(SdpaBackend):
    """Raises, as packages for another GPU do."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ...")


class LastKeyUnseen(SdpaBackend):
    """Whose mask is off by one."""

    def plan(self, batch: AttentionBatch) -> None:
        starts = batch.starts.copy()
        starts[1] -= 1
        super().plan(replace(batch, starts=starts))


class OtherPages(SdpaBackend):
    """Reads the pages of its neighbour."""

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, table=batch.table.roll(1, 0)))


class LongContextsCut(SdpaBackend):
    """Loses the end of what is long enough to be split."""

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, starts=np.minimum(batch.starts, 2000).astype(np.int32)))


class NotCompiled(SdpaBackend):
    """Has kernels that this machine cannot compile."""

    def compile(self, dtype: torch.dtype, device: torch.device) -> None:
        raise FileNotFoundError("ptxas")


class Nothing(SdpaBackend):
    """Gives NaN, of memory that nobody wrote."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.full((len(q), q.shape[1] * q.shape[2]), torch.nan)


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (
            Broken,
            "its trial failed: RuntimeError: CUDA error: no kernel image is available for [^\n]* device$",
        ),
        (LastKeyUnseen, "another result, off by"),
        (OtherPages, "another result, off by"),
        (LongContextsCut, "another result, off by"),
        (NotCompiled, "its trial failed: FileNotFoundError: ptxas"),
        (Nothing, "another result, off by nan"),
    ],
)
def test_others_do_not_and_say_why(backend: type[SdpaBackend], why: str) -> None:
    with pytest.raises(TrialFailed, match=why):
        try_attention(backend(2), shape(), 16, torch.bfloat16, CPU)


def test_a_backend_that_leaves_no_device_is_told_from_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "still_computes", lambda _device: False)
    with pytest.raises(DeviceLost, match="no kernel image"):
        try_attention(Broken(2), shape(), 16, torch.bfloat16, CPU)


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is for Linux")
def test_the_trial_runs_keys_split_in_every_number_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU that the trial's contexts are made for; the kernels are run by Triton's interpreter elsewhere."""
    from worker.runner.attention import triton_backend as triton

    splits: list[int] = []

    class Launching(triton.TritonBackend):
        def plan(self, batch: AttentionBatch) -> None:
            super().plan(batch)
            splits.extend(launch.num_splits for launch in self._launches)
            self._plain = SdpaBackend(self._num_kv_heads)
            self._plain.plan(batch)

        def compile(self, dtype: torch.dtype, device: torch.device) -> None:
            pass

        def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self._plain.attend(q, keys, values)

    monkeypatch.setattr(triton, "num_processors", lambda _device: 132)
    config = shape(num_heads=32, num_kv_heads=8, head_dim=128)
    try_attention(Launching(config, 16, torch.bfloat16, deterministic=False), config, 16, torch.bfloat16, CPU)
    assert set(splits) == {1, 2, 4, 8, 16, 32}

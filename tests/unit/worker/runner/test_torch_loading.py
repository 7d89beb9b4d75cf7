"""What loading plans for and holds, where it shows on a GPU alone."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixfleet.clock import MonotonicClock
from tests.support.tiny_model import tiny_model
from worker.core.messages import Ready
from worker.model import loading
from worker.model.errors import UnsupportedModel
from worker.model.linear import DenseBackend
from worker.model.loading import load_model
from worker.runner import torch_loading
from worker.runner.activation_peak import LiveBytes
from worker.runner.attention import backends
from worker.runner.kernels.compiler import KernelsUnavailable, find_compiler
from worker.runner.kernels.library import Kernels
from worker.runner.rows import RowState
from worker.runner.step_sampler import StepSampler
from worker.runner.torch_config import AttentionName, Dtype, TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

MIB = 1 << 20
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


def loaded(
    dtype: Dtype = "float32", attention: AttentionName = "sdpa", max_context: int = 256, path: Path | None = None
) -> Ready:
    config = TorchRunnerConfig(
        model_path=str(path or tiny_model(max_context=max_context)),
        dtype=dtype,
        attention=attention,
        device_memory_bytes=64 * MIB,
        max_running_requests=2,
        chunked_prefill_size=64,
    )
    runner = TorchRunner(config, MonotonicClock())
    try:
        return runner.load()
    finally:
        runner.close()


def test_a_model_whose_computations_exceed_the_dtype_does_not_start(tmp_path: Path) -> None:
    """Each weight is a number of float16, but not what the last layer makes of them."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model(), path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(60_000.0)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.gate_proj.weight"] * 1000
    save_file(weights, path / "model.safetensors")
    assert loaded(path=path).dtype == "float32"
    with pytest.raises(UnsupportedModel, match="a computation exceeds float16; set another --dtype"):
        loaded(dtype="float16", path=path)


@pytest.mark.parametrize("is_sound", [True, False])
def test_whether_a_model_is_sound_is_asked_of_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sound: bool
) -> None:
    """Not of whichever was drawn last. NaN in a weight stands for one that comes while the model computes."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model(), path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][slice(1, None) if is_sound else 0] = torch.nan
    save_file(weights, path / "model.safetensors")
    monkeypatch.setattr(loading, "refuse_nan", lambda _name, _tensor: None)
    with nullcontext() if is_sound else pytest.raises(UnsupportedModel, match="float32; download the model again"):
        loaded(path=path)


def test_the_pool_is_not_promised_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken since loading began, by cuBLAS, compiled kernels and other processes."""
    plain = loaded()
    monkeypatch.setattr(torch_loading, "reachable_memory", lambda _device, **_: 24 * MIB)
    scarce = loaded()
    assert (plain.memory.total_bytes, scarce.memory.total_bytes) == (64 * MIB, 24 * MIB)
    assert scarce.memory.kv_bytes < plain.memory.kv_bytes


def test_a_worker_that_loads_beside_this_one_takes_nothing_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers on one GPU, each with its --device-memory: 64 MiB of 160, of which the other took 64 meanwhile."""
    plain = loaded()
    looks = [96 * MIB, 160 * MIB]
    look = lambda _device, **_: looks.pop() if len(looks) > 1 else looks[0]  # noqa: E731
    monkeypatch.setattr(torch_loading, "reachable_memory", look)
    assert loaded().memory == plain.memory


def test_a_context_longer_than_any_pool_takes_no_more_memory_than_what_can_be_held() -> None:
    """Rotary tables of each position, and rows of each request, would take terabytes."""
    ready = loaded(max_context=10**12)
    assert ready.max_context_tokens == ready.capacity.kv_tokens


def test_what_this_worker_holds_itself_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights would be taken off twice."""
    kept: list[int] = []
    monkeypatch.setattr(torch_loading, "reachable_memory", lambda _device, *, kept_bytes: kept.append(kept_bytes))
    monkeypatch.setattr(RowState, "nbytes", 1000)
    monkeypatch.setattr(StepSampler, "nbytes", 200)
    weights_bytes = loaded().memory.weights_bytes
    assert kept == [weights_bytes + 1200]


@needs_compiler
@pytest.mark.parametrize(
    ("attention", "have_vectors", "expected"),
    [("auto", True, "bfloat16"), ("sdpa", True, "float32"), ("auto", False, "float32")],
)
def test_auto_takes_the_dtype_of_what_computes(
    monkeypatch: pytest.MonkeyPatch, attention: AttentionName, have_vectors: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(Kernels, "have_vectors", have_vectors)
    assert loaded(dtype="auto", attention=attention).dtype == expected


def test_kernels_that_cannot_be_had_are_tried_once_and_leave_auto_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fails(num_threads: int) -> Kernels:
        tries.append(num_threads)
        raise KernelsUnavailable("no memory for the threads of the kernels")

    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(backends, "Kernels", fails)
    assert loaded(dtype="auto", attention="auto").dtype == "float32"
    assert len(tries) == 1


class OnDevice(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts bfloat16 alone, as the device would hold it: the file is float32, and stays on the host."""

    def _watch(self, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.bfloat16:
            super()._watch(tensor)


def test_no_weight_is_held_twice() -> None:
    """Parts of fused layers are read into their places: a model that fits the device can be loaded there."""
    with OnDevice() as held:
        model = load_model(
            tiny_model(hidden_size=256), device=CPU, dtype=torch.bfloat16, linear_backend=DenseBackend(), max_context=16
        )
    assert held.peak <= model.nbytes + 4096

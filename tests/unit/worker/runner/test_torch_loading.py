"""What loading plans for and holds, where it shows on a GPU alone."""

from __future__ import annotations

import pytest
import torch

from radixfleet.clock import MonotonicClock
from tests.support.tiny_model import tiny_model
from worker.core.messages import Ready
from worker.model.linear import DenseBackend
from worker.model.loading import load_model
from worker.runner import devices, torch_loading
from worker.runner.activation_peak import LiveBytes
from worker.runner.torch_config import AttentionName, Dtype, TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

MIB = 1 << 20
CPU = torch.device("cpu")


def loaded(dtype: Dtype = "float32", attention: AttentionName = "sdpa") -> Ready:
    config = TorchRunnerConfig(
        model_path=str(tiny_model(max_context=256)),
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


@pytest.mark.parametrize(
    ("attention", "are_fast", "expected"),
    [("auto", True, "bfloat16"), ("sdpa", True, "float32"), ("auto", False, "float32")],
)
def test_auto_takes_the_dtype_of_what_computes(
    monkeypatch: pytest.MonkeyPatch, attention: AttentionName, are_fast: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(devices, "are_fast_for", lambda _model: are_fast)
    assert loaded(dtype="auto", attention=attention).dtype == expected


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

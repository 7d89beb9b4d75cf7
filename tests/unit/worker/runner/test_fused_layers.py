"""How layer operations are chosen, by kernels that compute well and by others."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from tests.support.tiny_model import tiny_model
from worker.model.configuration import ModelConfig, load_config
from worker.model.layer_ops import LayerOps, torch_ops
from worker.model.shapes import KNOWN_SHAPES
from worker.runner import fused_layers
from worker.runner.devices import DeviceError
from worker.runner.fused_layers import choose_layer_ops, try_layer_ops

CPU = torch.device("cpu")
PLAIN = torch_ops()


def shape() -> ModelConfig:
    return load_config(tiny_model("qwen3"))


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is for Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b", "llama-3.1-8b"])
def test_the_kernels_pass_their_trial_in_the_sizes_of_models(name: str, dtype: torch.dtype) -> None:
    from worker.model.fused_ops import FUSED

    chosen, passed_by = try_layer_ops(FUSED, PLAIN, KNOWN_SHAPES[name].config, CPU, dtype)
    assert (chosen, passed_by) == (FUSED, {})


def off_by_one_head(heads: Tensor, *given: Any) -> Tensor:
    return PLAIN.rotate_and_keep(heads, *given).roll(1, 1)


def keeps_beside(heads: Tensor, factors: Any, norms: Any, place: Any) -> Tensor:
    queries = PLAIN.rotate_and_keep(heads, factors, norms, place)
    place.values[place.slots[0] + 1] = 1
    return queries


def keeps_nothing(heads: Tensor, factors: Any, norms: Any, place: Any) -> Tensor:
    elsewhere = replace(place, keys=place.keys.clone(), values=place.values.clone())
    return PLAIN.rotate_and_keep(heads, factors, norms, elsewhere)


def without_the_sum(hidden: Tensor, _added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return PLAIN.add_and_norm(hidden, None, weight, epsilon)


def by_batch(gate_up: Tensor) -> Tensor:
    return PLAIN.gate(gate_up) * (1 + 1e-3 * len(gate_up))


def not_there(*_: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device\nCompile with ...")


def nothing(gate_up: Tensor) -> Tensor:
    return torch.full_like(PLAIN.gate(gate_up), torch.nan)


@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("rotate_and_keep", off_by_one_head, "another result, off by"),
        ("rotate_and_keep", keeps_beside, "another result, off by"),
        ("rotate_and_keep", keeps_nothing, "another result, off by"),
        ("rotate_and_keep", not_there, "its trial failed: RuntimeError: no kernel image .* device$"),
        ("add_and_norm", without_the_sum, "another result, off by"),
        ("add_and_norm", not_there, "its trial failed"),
        ("gate", by_batch, "other bits alone than in a batch"),
        ("gate", nothing, "another result, off by nan"),
    ],
)
def test_what_fails_or_computes_something_else_is_passed_by(name: str, broken: Callable[..., Any], why: str) -> None:
    others = torch_ops()  # equal, and not the same
    fused: LayerOps = replace(others, **{name: broken})
    chosen, passed_by = try_layer_ops(fused, PLAIN, shape(), CPU, torch.float32)
    assert chosen == replace(others, **{name: getattr(PLAIN, name)})
    assert list(passed_by) == [name]
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(passed_by[name])


def test_a_device_that_is_lost_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "still_computes", lambda _device: False)
    with pytest.raises(DeviceError, match=r"kernel gate has left cpu unusable: .* no kernel image"):
        try_layer_ops(replace(PLAIN, gate=not_there), PLAIN, shape(), CPU, torch.float32)


def test_memory_that_is_short_says_nothing_of_a_kernel() -> None:
    def full(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        try_layer_ops(replace(PLAIN, gate=full), PLAIN, shape(), CPU, torch.float32)


@pytest.mark.parametrize(("device", "fused"), [("cpu", True), ("cuda", False)])
def test_elsewhere_torch_computes(device: str, fused: bool) -> None:
    with capture_logs() as logs:
        ops = choose_layer_ops(shape(), torch.device(device), torch.float32, fused=fused)
    assert (ops.add_and_norm, ops.rotate_and_keep) == (PLAIN.add_and_norm, PLAIN.rotate_and_keep)
    assert logs == []


class FailsToImport(ModuleType):
    """A module that raises where something is imported from it."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise self._error


@pytest.mark.parametrize(
    ("error", "level", "why"),
    [
        (ImportError("No module named 'triton'"), "info", "No module named 'triton' (pip install 'radixfleet[gpu]')"),
        (OSError("libcuda.so.1: cannot open"), "warning", "OSError: libcuda.so.1: cannot open"),
        (TypeError("jit() got an argument"), "warning", "TypeError: jit() got an argument"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_triton_that_cannot_be_imported_is_passed_by(
    error: Exception, level: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "worker.model.fused_ops", FailsToImport("worker.model.fused_ops", error))
    with capture_logs() as logs:
        ops = choose_layer_ops(shape(), torch.device("cuda"), torch.bfloat16)
    assert (ops.add_and_norm, ops.rotate_and_keep) == (PLAIN.add_and_norm, PLAIN.rotate_and_keep)
    (line,) = logs
    assert (line["log_level"], line["why"]) == (level, why)


@pytest.mark.parametrize(
    ("passed_by", "level", "event"),
    [
        ({}, "info", "layers by kernels of Triton"),
        ({"gate": "no ptxas"}, "warning", "layers without some kernels of Triton: steps are slower"),
    ],
)
def test_a_gpu_is_told_which(
    passed_by: dict[str, str], level: str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    monkeypatch.setattr(fused_layers, "try_layer_ops", lambda *_: (PLAIN, passed_by))
    with capture_logs() as logs:
        assert choose_layer_ops(shape(), torch.device("cuda"), torch.bfloat16) is PLAIN
    (line,) = logs
    assert (line["log_level"], line["event"], line.get("passed_by", {})) == (level, event, passed_by)

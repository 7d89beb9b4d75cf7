from pathlib import Path

import psutil
import pytest
import torch
from structlog.testing import capture_logs

from worker.runner import devices
from worker.runner.devices import (
    DeviceError,
    choose_dtype,
    make_current,
    open_device,
    reachable_memory,
    usable_memory,
    warn_of_idle_gpu,
)

CPU = torch.device("cpu")


def test_auto_is_the_cpu_where_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_device("auto") == CPU
    assert open_device("cpu") == CPU


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert open_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(DeviceError, match="no device cuda:1: torch sees 1 CUDA devices"):
        open_device("cuda:1")
    with pytest.raises(DeviceError, match="'gpu' is no device; use auto, cpu, cuda or cuda:N"):
        open_device("gpu")
    with pytest.raises(DeviceError, match="type meta are not supported"):
        open_device("meta")


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="no device cuda: this torch is built without CUDA; use cpu, or see"):
        open_device("cuda")


def test_a_gpu_that_is_named_becomes_the_one_that_triton_launches_on(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cuda", "cuda:1"):
        make_current(torch.device(name))
    assert current == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_of_a_cpu_follows_its_instructions(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert choose_dtype(CPU, "auto", by_kernels=False) == expected
    assert choose_dtype(CPU, "float32", by_kernels=False) == torch.float32
    assert choose_dtype(CPU, "bfloat16", by_kernels=False) == torch.bfloat16


def test_auto_dtype_of_a_cpu_without_such_instructions_is_that_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert choose_dtype(CPU, "auto", by_kernels=True) == torch.bfloat16
    assert choose_dtype(CPU, "float32", by_kernels=True) == torch.float32


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_auto_dtype_of_a_gpu_follows_its_generation(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert choose_dtype(torch.device("cuda"), "auto", by_kernels=False) == expected


def test_a_cpu_gives_half_of_the_machine_or_of_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(devices, "_CGROUP_LIMIT", limit)
    total = psutil.virtual_memory().total
    assert usable_memory(CPU, None) == total // 2  # no such file
    limit.write_text("max\n")
    assert usable_memory(CPU, None) == total // 2
    limit.write_text("1000000\n")
    assert usable_memory(CPU, None) == 500_000
    assert usable_memory(CPU, 123) == 123


def test_a_gpu_gives_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (70, 80))
    assert usable_memory(torch.device("cuda"), None) == 70


def test_what_the_allocator_holds_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (70, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 6)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 5)
    assert reachable_memory(torch.device("cuda"), kept_bytes=5) == 76
    assert reachable_memory(CPU, kept_bytes=5) is None


def test_what_libraries_hold_of_the_allocators_memory_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS's workspaces: one for each stream, for good."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (70, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 6)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 5)
    assert reachable_memory(torch.device("cuda"), kept_bytes=3) == 74


@pytest.mark.parametrize(
    ("files", "visible", "expected"), [(["nvidia0"], None, 1), (["nvidia0"], "", 0), (["null", "nvidiactl"], None, 0)]
)
def test_a_gpu_that_is_not_used_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], visible: str | None, expected: int
) -> None:
    """Who has one rarely means the CPU: a torch without CUDA is what pip finds in some places."""
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", None)
    with capture_logs() as logs:
        warn_of_idle_gpu()
    assert [line["why"] for line in logs] == ["this torch is built without CUDA"] * expected

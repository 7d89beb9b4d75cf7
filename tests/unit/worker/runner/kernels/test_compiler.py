from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog
import torch

from tests.support.tiny_model import tiny_model
from worker.model.configuration import load_config
from worker.runner.attention.backends import open_kernels
from worker.runner.attention.cpu import CpuBackend
from worker.runner.devices import DeviceError
from worker.runner.kernels import library
from worker.runner.kernels.compiler import KernelsUnavailable, compiled_library, find_compiler

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "radixfleet"


@pytest.fixture
def no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CC", raising=False)
    library.load_library.cache_clear()


@needs_compiler
def test_the_library_is_compiled_once_for_each_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled_library()
    assert os.listdir(cache) == [path.name]
    written = path.stat().st_mtime_ns
    assert compiled_library() == path
    assert path.stat().st_mtime_ns == written
    compiler = find_compiler()
    assert compiler is not None
    monkeypatch.setenv("CC", f"{compiler[0]} -DRF_ANOTHER_COMPILER=1")
    other = compiled_library()
    assert set(os.listdir(cache)) == {path.name, other.name}
    assert other != path


def test_a_compiler_that_fails_is_named_with_its_message(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(KernelsUnavailable, match="false failed"):
        compiled_library()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_is_torch_and_one_line_says_so() -> None:
    with structlog.testing.capture_logs() as logs:
        assert open_kernels("auto", load_config(tiny_model()), CPU, torch.float32, 1) is None
    (line,) = logs
    assert line["log_level"] == "warning"
    assert "no C compiler" in line["why"]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_asking_for_the_kernels_fails_with_advice() -> None:
    with pytest.raises(DeviceError, match=r"no C compiler.*use auto or sdpa"):
        open_kernels("cpu", load_config(tiny_model()), CPU, torch.float32, 1)


@needs_compiler
def test_float16_is_left_to_torch() -> None:
    with structlog.testing.capture_logs():
        assert open_kernels("auto", load_config(tiny_model()), CPU, torch.float16, 1) is None


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_auto_takes_the_kernels_where_they_work(dtype: torch.dtype) -> None:
    config = load_config(tiny_model())
    kernels = open_kernels("auto", config, CPU, dtype, 2)
    assert kernels is not None
    assert kernels.num_threads == 2
    assert CpuBackend(kernels, config).name == "cpu"
    assert open_kernels("sdpa", config, CPU, dtype, 1) is None

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import structlog
import torch

from tests.support.tiny_model import tiny_model
from tests.support.waiting import wait_until
from worker.model.configuration import load_config
from worker.runner.attention.backends import open_kernels
from worker.runner.attention.cpu import CpuBackend
from worker.runner.devices import DeviceError
from worker.runner.kernels import compiler as kernel_compiler
from worker.runner.kernels import library
from worker.runner.kernels.compiler import KernelsUnavailable, find_compiler, load_compiled
from worker.runner.torch_config import Dtype

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


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a script $CC: what it "compiles" is a text."""

    def make(compiles: str) -> None:
        script = tmp_path / "cc"
        target = 'while [ "$1" != -o ]; do shift; done'
        script.write_text(f'#!/bin/sh\ncase "$*" in *-dM*|*--version) exit 0;; esac\n{target}\n{compiles}\n')
        script.chmod(0o700)
        monkeypatch.setenv("CC", str(script))

    return make


def text_of(library: Path) -> str:
    """In place of loading it; refuses what has no end, as the loader does."""
    text = library.read_text()
    if not text.endswith("end\n"):
        raise OSError("file too short")
    return text


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


@needs_compiler
def test_the_library_is_compiled_once_for_each_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = load_compiled(lambda library: library)
    assert libraries(cache) == [path]
    written = path.stat().st_mtime_ns
    assert load_compiled(lambda library: library) == path
    assert path.stat().st_mtime_ns == written
    compiler = find_compiler()
    assert compiler is not None
    monkeypatch.setenv("CC", f"{compiler[0]} -DRF_ANOTHER_COMPILER=1")
    other = load_compiled(lambda library: library)
    assert libraries(cache) == sorted([path, other])
    assert other != path


def test_of_many_who_come_at_once_one_compiles(compiler: Callable[[str], None], cache: Path, tmp_path: Path) -> None:
    compiler(f'echo compiled >> {tmp_path}/log; echo end > "$2"')
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda _: load_compiled(text_of), range(4)))
    assert texts == ["end\n"] * 4
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert len(libraries(cache)) == 1


def test_a_library_that_was_cut_off_is_compiled_anew(
    compiler: Callable[[str], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler('echo end > "$2"')
    load_compiled(text_of)
    (library,) = libraries(cache)
    library.write_text("")
    assert load_compiled(text_of) == "end\n"
    assert library.read_text() == "end\n"
    assert "compiled anew: file too short" in caplog.text


def test_a_library_that_never_loads_is_no_kernels(compiler: Callable[[str], None], cache: Path, tmp_path: Path) -> None:
    compiler(f'echo compiled >> {tmp_path}/log; echo half > "$2"')
    with pytest.raises(KernelsUnavailable, match="file too short") as caught:
        load_compiled(text_of)
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert "XDG_CACHE_HOME" in caught.value.advice
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_without_a_place_to_keep_it_every_start_compiles(
    compiler: Callable[[str], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler('echo end > "$2"')
    cache.write_text("a file where the directory should be")
    place, text = load_compiled(lambda library: (library, text_of(library)))
    assert text == "end\n"
    assert not place.exists()
    assert "every start compiles them" in caplog.text


@pytest.mark.parametrize("relative", ["relative/dir", ".", "~/cache"])
def test_a_relative_cache_is_ignored(
    compiler: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: str
) -> None:
    """As the XDG Base Directory Specification has it: else every folder that a worker starts in would get its own."""
    compiler('echo end > "$2"')
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "started-in").mkdir()
    monkeypatch.chdir(tmp_path / "started-in")
    assert load_compiled(lambda library: library.parent) == tmp_path / "home" / ".cache" / "radixfleet"
    assert list(Path().iterdir()) == []


def test_a_user_without_a_home_has_kernels(
    compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    compiler('echo end > "$2"')
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert load_compiled(text_of) == "end\n"
    assert "home" in caplog.text


def test_nothing_is_loaded_from_where_others_can_write(
    compiler: Callable[[str], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler('echo end > "$2"')
    load_compiled(text_of)
    (library,) = libraries(cache)
    library.write_text("planted, end\n")
    cache.chmod(0o777)
    assert load_compiled(text_of) == "end\n"
    assert "can be written to by others" in caplog.text


def test_a_cache_that_a_group_can_write_to_is_none(
    compiler: Callable[[str], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler('echo end > "$2"')
    cache.mkdir()
    cache.chmod(0o770)
    assert load_compiled(text_of) == "end\n"
    assert "can be written to by others" in caplog.text
    assert libraries(cache) == []


@pytest.mark.parametrize("how", ["a link", "open to a group", "somebody's"])
def test_a_library_that_somebody_else_may_have_put_there_is_compiled_anew(
    compiler: Callable[[str], None], cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    compiler('echo end > "$2"')
    load_compiled(text_of)
    (library,) = libraries(cache)
    library.write_text("planted, end\n")
    if how == "a link":
        library.rename(tmp_path / "elsewhere")
        library.symlink_to(tmp_path / "elsewhere")
    elif how == "open to a group":
        library.chmod(0o775)
    elif os.getuid() != 0:
        pytest.skip("only root can give a file away")
    else:
        os.chown(library, 12345, -1)
    assert load_compiled(text_of) == "end\n"
    assert "compiled anew" in caplog.text
    caplog.clear()
    assert load_compiled(text_of) == "end\n"
    assert not caplog.records


def test_an_open_umask_makes_no_library_that_is_refused(
    compiler: Callable[[str], None], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler('echo end > "$2"')
    before = os.umask(0)
    try:
        load_compiled(text_of)
    finally:
        os.umask(before)
    caplog.clear()
    assert load_compiled(text_of) == "end\n"
    assert not caplog.records


def test_where_programs_may_not_run_from_the_cache_it_is_compiled_once_and_copied(
    compiler: Callable[[str], None], cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def load(library: Path) -> str:
        if library.parent == cache:
            raise OSError("failed to map segment from shared object: Operation not permitted")
        return text_of(library)

    compiler(f'echo compiled >> {tmp_path}/log; echo end > "$2"')
    assert [load_compiled(load) for _ in range(2)] == ["end\n"] * 2
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert "loaded from a copy: failed to map segment" in caplog.text


def test_whoever_waits_too_long_for_its_turn_compiles_as_well(
    compiler: Callable[[str], None], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that waits for ever would count as one that hangs."""
    compiler('echo end > "$2"')
    monkeypatch.setattr(kernel_compiler, "_wait_for", partial(kernel_compiler._wait_for, patience_s=0.2))
    cache.mkdir(mode=0o700)
    with (cache / "kernels.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert load_compiled(text_of) == "end\n"
    assert "compiling as well" in caplog.text


def test_what_killed_starts_have_left_is_swept_and_what_others_build_is_not(
    compiler: Callable[[str], None], cache: Path
) -> None:
    compiler('echo end > "$2"')
    for name in ("build-left", "build-now"):
        (cache / name).mkdir(mode=0o700, parents=True)
    cache.chmod(0o700)
    (cache / "build-left" / "kernels.so").write_text("half")
    os.utime(cache / "build-left", (1, 1))
    load_compiled(text_of)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["build-now"]


def test_a_library_of_an_image_is_used_where_nothing_can_be_written(
    compiler: Callable[[str], None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo end > "$2"')
    load_compiled(text_of)
    (library,) = libraries(cache)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(kernel_compiler, "_turn", refuse)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    assert load_compiled(lambda path: path) == library


def test_a_compiler_that_fails_is_named_with_its_message(
    compiler: Callable[[str], None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("echo In file included from here >&2; echo x.c: error: no such thing >&2; exit 1")
    with pytest.raises(KernelsUnavailable, match=r"cc failed: x\.c: error: no such thing"):
        load_compiled(text_of)
    assert libraries(cache) == []
    monkeypatch.setenv("CC", "false")
    with pytest.raises(KernelsUnavailable, match="false failed: no message"):
        load_compiled(text_of)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(KernelsUnavailable, match="no-such-compiler does not work"):
        load_compiled(text_of)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("/nonexistent", "/nonexistent does not work: No such file or directory$"),
        ("/", "/ does not work: Permission denied$"),
        ("false", "failed"),
        ("true", "reported success, but wrote no library"),
    ],
)
def test_a_wrong_cc_is_to_be_changed_and_nothing_to_be_installed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, why: str
) -> None:
    monkeypatch.setenv("CC", wrong)
    with pytest.raises(KernelsUnavailable, match=why) as caught:
        load_compiled(text_of)
    assert caught.value.advice == "set CC to a C compiler that works, or unset it"
    assert [path.name for path in cache.glob("*") if path.name != "kernels.lock"] == []


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
    compiler: Callable[[str], None], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, pid = tmp_path / "gate", tmp_path / "pid"
    os.mkfifo(gate)
    compiler(f"cat {gate} & echo $! > {pid}; wait")
    monkeypatch.setattr(kernel_compiler, "_TIMEOUT_S", 1.0)
    with pytest.raises(KernelsUnavailable, match="did not end within 1 s") as caught:
        load_compiled(text_of)
    assert caught.value.advice == "set CC to a C compiler that works, or unset it"
    wait_until(lambda: not runs(pid))
    assert libraries(cache) == []


def runs(pid: Path) -> bool:
    try:
        return psutil.Process(int(pid.read_text())).status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.NoSuchProcess):  # it was ended before it could say its number
        return False


@pytest.mark.parametrize("wrong", ["gcc '-O2", 'gcc "'])
def test_a_cc_that_is_no_command_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("CC", wrong)
    with pytest.raises(KernelsUnavailable, match=r"\$CC is not a command") as caught:
        load_compiled(text_of)
    assert "unset it" in caught.value.advice
    assert not cache.exists()


def test_an_empty_cc_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    usual = find_compiler()
    monkeypatch.setenv("CC", "  ")
    assert find_compiler() == usual


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_is_torch_and_one_line_says_so() -> None:
    with structlog.testing.capture_logs() as logs:
        assert open_kernels("auto", load_config(tiny_model()), CPU, "float32", 1) is None
    (line,) = logs
    assert line["log_level"] == "warning"
    assert "no C compiler" in line["why"]
    assert "install a C compiler" in line["why"]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_asking_for_the_kernels_fails_with_advice() -> None:
    with pytest.raises(DeviceError, match=r"no C compiler.*; install a C compiler.*, or use auto or sdpa"):
        open_kernels("cpu", load_config(tiny_model()), CPU, "float32", 1)


@needs_compiler
def test_float16_is_left_to_torch() -> None:
    with structlog.testing.capture_logs():
        assert open_kernels("auto", load_config(tiny_model()), CPU, "float16", 1) is None


@needs_compiler
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_auto_takes_the_kernels_where_they_work(dtype: Dtype) -> None:
    config = load_config(tiny_model())
    kernels = open_kernels("auto", config, CPU, dtype, 2)
    assert kernels is not None
    assert kernels.num_threads == 2
    assert CpuBackend(kernels, config).name == "cpu"
    assert open_kernels("sdpa", config, CPU, dtype, 1) is None

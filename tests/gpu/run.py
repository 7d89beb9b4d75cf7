"""Everything that needs a GPU, in one go, on one of them, in less than ten minutes:

    python -m tests.gpu.run                  # the exit code: 0, 1 where a stage failed, 2 where nothing can be run
    python -m tests.gpu.run --seconds 300    # in less time: what comes last is left out
    python -m tests.gpu.run -k graphs        # further arguments are pytest's, and no figures are taken

Stages, each in a process of its own, so that none that fails, hangs or breaks its CUDA context ends the others: the
shortest way to a token first, then graphs, layers, overlap, running out of memory, figures (`tests.gpu.figures`,
`tests.gpu.layer_figures`), and the long suites last. It needs the source tree as the current directory and the packages
that `missing` looks for, but neither an installation nor a network. What it prints is meant to be pasted: device,
versions and attention packages come first, a table of the stages and all that failed last.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
TOTAL_S = 540.0
NOTHING_SELECTED = 5
"""An exit code of pytest."""
LEAST_S = 5.0
"""A stage that would have less is not begun."""
FLASH = ("vllm.vllm_flash_attn", "vllm_flash_attn", "flash_attn_interface", "flash_attn")
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""As runner processes have it (`worker.engine.config`)."""
ALLOCATE = "import torch; torch.empty(64 << 20, dtype=torch.uint8, device='cuda').fill_(1).sum().item()"


@dataclass(frozen=True)
class Stage:
    """One process."""

    name: str
    command: Sequence[str]
    limit_s: float

    @classmethod
    def of_tests(cls, name: str, limit_s: float, path: str, *arguments: str) -> Self:
        """The tests for GPUs in a file."""
        options = (
            "-m",
            "gpu",
            "-q",
            "--timeout=120",
            "-W",
            "default",
            "-p",
            "no:cacheprovider",
            "--durations=3",
            "-rfE",
        )
        return cls(name, (sys.executable, "-m", "pytest", *options, path, *arguments), limit_s)


@dataclass(frozen=True)
class Outcome:
    """What became of a stage."""

    stage: Stage
    said: str
    """"passed", or why it did not."""
    seconds: float
    failures: Sequence[str]

    @property
    def is_fine(self) -> bool:
        """It passed, or there was nothing in it to do."""
        return self.said in ("passed", "nothing selected")


def stages(arguments: Sequence[str]) -> list[Stage]:
    """In order. `arguments` are pytest's."""
    figures = Stage("figures", (sys.executable, "-m", "tests.gpu.figures"), 220)
    layer_figures = Stage("layer figures", (sys.executable, "-m", "tests.gpu.layer_figures"), 60)
    tests = [
        Stage.of_tests("runner", 150, "tests/conformance/test_runners.py", *arguments),
        Stage.of_tests("graphs", 120, "tests/gpu/test_decode_graphs.py", *arguments),
        Stage.of_tests("layers", 90, "tests/gpu/test_fused_layers.py", *arguments),
        Stage.of_tests("overlap", 90, "tests/gpu/test_overlap.py", *arguments),
        Stage.of_tests("memory", 90, "tests/gpu/test_out_of_memory.py", *arguments),
        Stage.of_tests("sampler", 60, "tests/unit/worker/sampling/test_sampler.py", *arguments),
        Stage.of_tests("determinism", 120, "tests/gpu/test_determinism.py", *arguments),
        Stage.of_tests("layer kernels", 120, "tests/conformance/test_layer_ops.py", *arguments),
        Stage.of_tests("attention", 240, "tests/conformance/test_attention_backends.py", *arguments),
    ]
    return tests if arguments else [*tests[:5], figures, layer_figures, *tests[5:]]


def main() -> int:
    """Says what there is, runs all stages, and sums them up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all of it (default %(default)s)")
    options, arguments = parser.parse_known_args()
    ends_s = time.monotonic() + options.seconds
    if lacking := missing():
        print(f"missing: pip install -c constraints.txt {' '.join(lacking)}", file=sys.stderr)
        return 2
    environment = with_sources(os.environ)
    if describe(environment):
        return 2
    outcomes = run_all(stages(arguments), with_memory(environment), ends_s)
    print(summary(outcomes))
    return 0 if all(outcome.is_fine for outcome in outcomes) else 1


def run_all(planned: Sequence[Stage], environment: dict[str, str], ends_s: float) -> list[Outcome]:
    """One after another, as long as there is time."""
    outcomes = []
    for stage in planned:
        left_s = ends_s - time.monotonic()
        if left_s < LEAST_S:
            outcomes.append(Outcome(stage, "not begun: no time left", 0.0, ()))
        else:
            print(f"\n=== {stage.name}", flush=True)
            outcomes.append(run_stage(stage, environment, min(stage.limit_s, left_s)))
    return outcomes


def run_stage(stage: Stage, environment: dict[str, str], limit_s: float) -> Outcome:
    """Shows what the stage prints as it comes; ends it, and all that it started, after `limit_s`."""
    began_s = time.monotonic()
    late = threading.Event()
    failures = []
    with subprocess.Popen(
        stage.command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:

        def end() -> None:
            late.set()
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit_s, end)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(("FAILED", "ERROR")):
                failures.append(line.strip())
        timer.cancel()
    said = f"out of time after {limit_s:.0f} s" if late.is_set() else said_by(process.returncode)
    return Outcome(stage, said, time.monotonic() - began_s, failures)


def said_by(code: int) -> str:
    """What an exit code of pytest, or of a script, says."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return {0: "passed", NOTHING_SELECTED: "nothing selected"}.get(code, f"failed (exit code {code})")


def summary(outcomes: Sequence[Outcome]) -> str:
    """A table of the stages, then what failed in them."""
    lines = ["", "stage          seconds  outcome"]
    lines += [f"{each.stage.name:13}  {each.seconds:7.1f}  {each.said}" for each in outcomes]
    return "\n".join(lines + [failure for each in outcomes for failure in each.failures])


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

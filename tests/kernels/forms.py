"""Every form of the kernels in C that this machine can run, over random cases against the same in double precision:

    python -m tests.kernels.forms                            # which forms ran, and the largest error of each
    python -m tests.kernels.forms --sanitize address,thread  # with bounds, undefined behaviour, races checked as well
    python -m tests.kernels.forms --only AVX2 --cases 5000 --seed 7

A form is what the compiler's flags make of the sources: a worker gets that of its own CPU. Each becomes a program with
the checks of this directory, whose memory lies between pages that nobody may touch. NEON wants qemu-user and a cross
compiler (Debian: qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross); x86 forms that the CPU lacks run under
qemu-x86_64, where that has them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from worker.runner.kernels.compiler import KernelsUnavailable, find_compiler

CHECKS = Path(__file__).parent
KERNELS = Path(__file__).parents[2] / "worker" / "runner" / "kernels"
FLAGS = ("-g", "-std=gnu11", "-pthread", "-Wno-psabi", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS}")
FAULTS = tuple(f"-Wl,--wrap={name}" for name in ("aligned_alloc", "calloc", "malloc", "pthread_create"))
"""Functions that the checks make fail."""
_LEAST_PROGRAM = "int main(void) { return 0; }"
Sanitizer = Literal["none", "address", "thread"]
SANITIZERS: dict[Sanitizer, tuple[str, ...]] = {
    "none": ("-O3",),
    "address": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    "thread": ("-O1", "-fsanitize=thread"),
}
X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Form:
    """How the kernels are compiled for some CPUs."""

    name: str
    flags: tuple[str, ...]
    machines: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    """Features of the CPU, as /proc/cpuinfo names them."""


_BF16 = frozenset({"avx512_bf16", "avx512bw", "avx512dq", "avx512vl"})
FORMS = (
    Form("AMX", ("-march=cooperlake", "-mamx-tile", "-mamx-bf16"), X86, _BF16 | {"amx_bf16", "amx_tile"}),
    Form("AVX512-BF16", ("-march=cooperlake",), X86, _BF16),
    Form("AVX512", ("-march=skylake-avx512",), X86, frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    Form("AVX2", ("-march=haswell",), X86, frozenset({"avx2", "fma", "bmi2"})),
    Form("no vector instructions", ("-march=x86-64",), X86),
    Form("NEON", ("-march=armv8-a",), ARM),
)
"""By what `rf_features` says of them."""


class CannotRun(Exception):
    """This machine cannot build or run a form; the message says what is missing."""


class ChecksFailed(Exception):
    """The message is what the program printed."""


def run_form(form: Form, sanitizer: Sanitizer, *, seed: int, cases: int, threads: int, timeout_s: float = 3600) -> str:
    """What the checks print. Raises CannotRun, ChecksFailed."""
    emulator = _emulator(form, sanitizer)
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "checks"
        _build(form, sanitizer, program, is_static=bool(emulator))
        command = [*emulator, str(program), str(seed), str(cases), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if "unexpected memory mapping" in done.stderr:
        raise CannotRun("the thread sanitizer does not work with this system's address space")
    if done.returncode != 0:
        raise ChecksFailed(f"{' '.join(command[-3:])} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    used = done.stdout.partition("\n")[0]
    if used != f"uses {form.name}":
        what = f"a program for {form.name} {used}"
        if emulator:
            raise CannotRun(f"{what} under {emulator[0]}, which lacks something")
        raise ChecksFailed(f"{what}, though this CPU has what it needs")
    return done.stdout


def _emulator(form: Form, sanitizer: Sanitizer) -> list[str]:
    """What runs the program: nothing on a CPU that can."""
    is_own = platform.machine() in form.machines
    lacking = sorted(form.needs - _cpu_features())
    if is_own and not lacking:
        return []
    what = f"a CPU with {', '.join(lacking)}" if is_own else f"a CPU of another kind ({form.machines[0]})"
    if sanitizer != "none":
        raise CannotRun(f"sanitizers do not work under an emulator, and this form needs {what}")
    emulator = shutil.which(f"qemu-{form.machines[0]}")
    if emulator is None or any(feature.startswith(("avx512", "amx")) for feature in lacking):
        raise CannotRun(f"it needs {what}, or an emulator that has it (Debian: qemu-user)")
    return [emulator, "-cpu", "max"]


def _cpu_features() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))
    return found if _system_grants_tiles() else found - {"amx_tile"}


def _system_grants_tiles() -> bool:
    """Whether Linux lets this process use AMX, which sandboxes may not."""
    arch_prctl, ask_for_permission, tile_data = 158, 0x1023, 18
    return platform.machine() in X86 and ctypes.CDLL(None).syscall(arch_prctl, ask_for_permission, tile_data) == 0


def _build(form: Form, sanitizer: Sanitizer, program: Path, *, is_static: bool) -> None:
    sources = [str(path) for directory in (CHECKS, KERNELS) for path in sorted(directory.glob("*.c"))]
    compiler = _compiler_for(form)
    flags = [*FLAGS, *SANITIZERS[sanitizer], *form.flags, *(["-static"] if is_static else [])]
    lacking = _said_of([*compiler, *flags, "-x", "c", "-", "-lm", "-o", str(program)], _LEAST_PROGRAM)
    if lacking:
        raise CannotRun(f"{compiler[0]} lacks something for this form: {lacking.splitlines()[-1]}")
    wrong = _said_of([*compiler, *flags, *FAULTS, *sources, "-lm", "-o", str(program)])
    if wrong:
        raise ChecksFailed(wrong)


def _said_of(command: list[str], program: str = "") -> str:
    """What a compiler has against a program; nothing where it compiles it."""
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    return done.stderr.strip() or "it says nothing" if done.returncode else ""


def _compiler_for(form: Form) -> list[str]:
    if platform.machine() not in form.machines:
        cross = f"{form.machines[0]}-linux-gnu-gcc"
        if shutil.which(cross) is None:
            raise CannotRun(f"no {cross} (Debian: gcc-{form.machines[0].replace('_', '-')}-linux-gnu)")
        return [cross]
    try:
        compiler = find_compiler()
    except KernelsUnavailable as error:
        raise CannotRun(f"{error}; {error.advice}") from error
    if compiler is None or shutil.which(compiler[0]) is None:
        raise CannotRun("no C compiler" if compiler is None else f"$CC: there is no {compiler[0]}")
    return compiler


def main() -> int:
    """Runs what can run; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a form, by its name")
    parser.add_argument("--sanitize", default="none", help=f"of {', '.join(get_args(Sanitizer))}, with commas between")
    parser.add_argument("--cases", type=int, default=200, help="of each kind (of whole steps a tenth; default 200)")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    forms = [form for form in FORMS if arguments.only in (None, form.name)]
    sanitizers = [name for name in SANITIZERS if name in arguments.sanitize.split(",")]
    if not forms or not sanitizers:
        parser.error(f"forms: {', '.join(form.name for form in FORMS)}; sanitizers: {', '.join(SANITIZERS)}")
    outcomes = [_told(form, sanitizer, arguments) for form in forms for sanitizer in sanitizers]
    return 0 if all(outcomes) else 1


def _told(form: Form, sanitizer: Sanitizer, arguments: argparse.Namespace) -> bool:
    """Prints how a form does; whether nothing was wrong."""
    title = form.name if sanitizer == "none" else f"{form.name}, {sanitizer} sanitizer"
    print(f"{title}: ", end="", flush=True)
    started = time.monotonic()
    try:
        said = run_form(form, sanitizer, seed=arguments.seed, cases=arguments.cases, threads=arguments.threads)
    except CannotRun as error:
        print(f"not run: {error}")
        return True
    except ChecksFailed as error:
        print(f"WRONG\n{error}")
        return False
    print(f"right, {time.monotonic() - started:.0f} s")
    print("".join(f"  {line}\n" for line in said.splitlines()[1:]), end="", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())

"""What drawing tokens costs a CPU, on one thread: milliseconds of CPU for a step's rows, by what they ask for.

    OMP_NUM_THREADS=1 python tests/bench/bench_sampling.py [--rows 8] [--vocab 49152]

Without a C compiler tokens are drawn by numpy ("numpy"); with one by the kernel ("kernel").
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from worker.runner.kernels.compiler import find_compiler
from worker.runner.kernels.draw import KernelDraw
from worker.runner.kernels.library import Kernels
from worker.sampling.batch import SamplingBatch
from worker.sampling.host_draw import Winners, winners_by_bounds
from worker.sampling.sampler import sample

CASES: dict[str, tuple[float, int, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "temperature, top_k 40": (0.8, 40, 1.0, 0.0),
    "temperature, top_p 0.95": (0.8, 0, 0.95, 0.0),
    "temperature 8, top_p 0.95": (8.0, 0, 0.95, 0.0),
    "temperature, min_p 0.05": (0.8, 0, 1.0, 0.05),
    "temperature, top_k 40, top_p 0.95": (0.8, 40, 0.95, 0.0),
}


def milliseconds(logits: torch.Tensor, batch: SamplingBatch, winners: Winners) -> float:
    """The least of many tries."""
    times = []
    for _ in range(30):
        changed = logits.clone()
        began = time.thread_time()
        sample(changed, batch, winners)
        times.append((time.thread_time() - began) * 1e3)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=49_152)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = arguments.rows
    logits = torch.randn(rows, arguments.vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, :20] += 8
    forms: dict[str, Winners] = {"numpy": winners_by_bounds}
    if find_compiler() is not None:
        forms["kernel"] = KernelDraw(Kernels(num_threads=1))
    print(f"{rows} rows of {arguments.vocab} logits: {'':12}" + "".join(f"{name:>10}" for name in forms))
    for name, (temperature, top_k, top_p, min_p) in CASES.items():
        batch = SamplingBatch(
            temperature=np.full(rows, temperature, np.float32),
            top_k=np.full(rows, top_k),
            top_p=np.full(rows, top_p),
            min_p=np.full(rows, min_p),
            seeds=np.arange(rows, dtype=np.uint64),
            positions=np.full(rows, 100),
        )
        print(f"{name:38}" + "".join(f"{milliseconds(logits, batch, form):10.2f}" for form in forms.values()))


if __name__ == "__main__":
    main()

"""Rate of linear layers: `python tests/bench/bench_linears.py [MODEL] [--threads 1,2] [--rows 1,8,32,128,512,2048]`.

Prints, for each number of rows, GFLOP/s of all linear layers of the model's blocks by the kernels in C and by oneDNN
with packed weights, as torch calls it, measured in turns, and how many times as fast the kernels are. Each layer has
weights of its own for several blocks, so that they come from memory as in a step. Of each call the fastest of several
counts; on one thread its CPU time, which other processes disturb least. Before each turn is a pause: OpenMP's threads
spin for milliseconds after a call, on a core that the other's threads need.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence

import torch

from worker.model.configuration import ModelConfig, load_config
from worker.model.linear import Linear, LinearBackend, PackedBackend
from worker.model.sources import resolve_model
from worker.runner.kernels.library import Kernels
from worker.runner.kernels.linear import KernelLinearBackend

_BLOCKS = 12
_PAUSE_S = 0.01
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of a block."""
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": (query + 2 * key_value, config.hidden_size),
        "output": (config.hidden_size, query),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def fastest_calls(
    layers: Sequence[Sequence[Linear]], x: torch.Tensor, repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Of each backend, seconds of a call: the median over the blocks of the fastest of each."""
    best = [[float("inf")] * _BLOCKS for _ in layers]
    for _ in range(repeats):
        for backend, blocks in enumerate(layers):
            time.sleep(_PAUSE_S)
            for block, layer in enumerate(blocks):
                started = clock()
                layer(x)
                best[backend][block] = min(best[backend][block], clock() - started)
    return [sorted(times)[_BLOCKS // 2] for times in best]


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,8,32,128,256,512,1024,2048")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    libc = ctypes.CDLL(None)  # results of calls are not to come from pages that the system must clear first
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    shapes = shapes_of(load_config(resolve_model(arguments.model, print)))
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        backends: tuple[LinearBackend, ...] = (KernelLinearBackend(Kernels(threads)), PackedBackend())
        weights = {
            name: [torch.randn(shape).bfloat16() * 0.05 for _ in range(_BLOCKS)] for name, shape in shapes.items()
        }
        layers = {name: [[each.prepare(w, None) for w in weights[name]] for each in backends] for name in shapes}
        for rows in map(int, arguments.rows.split(",")):
            print_rates(threads, rows, shapes, layers, arguments.repeats, clock)


@torch.inference_mode()
def print_rates(
    threads: int,
    rows: int,
    shapes: dict[str, tuple[int, int]],
    layers: dict[str, list[list[Linear]]],
    repeats: int,
    clock: Callable[[], float],
) -> None:
    """One line."""
    totals, told = [0.0, 0.0], []
    for name, (_, inputs) in shapes.items():
        seconds = fastest_calls(layers[name], torch.randn(rows, inputs).bfloat16(), repeats, clock)
        totals = [total + each for total, each in zip(totals, seconds, strict=True)]
        told.append(f"{name} {seconds[1] / seconds[0]:4.2f}")
    operations = sum(2 * rows * outputs * inputs for outputs, inputs in shapes.values())
    kernels, packed = (operations / total / 1e9 for total in totals)
    print(
        f"threads {threads}, {rows:4} rows: kernels {kernels:5.0f}, oneDNN packed {packed:5.0f} GFLOP/s,"
        f" {kernels / packed:4.2f} times as fast ({', '.join(told)})",
        flush=True,
    )


if __name__ == "__main__":
    main()

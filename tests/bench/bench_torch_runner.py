"""Speed of the torch runner on this machine: `python tests/bench/bench_torch_runner.py [MODEL] [--threads 1,2]`.

Prints, for each number of threads, what packing the weights gains a layer, milliseconds a decode step at several batch
sizes and contexts, and prompt tokens a second at several chunk sizes. Tells the best of several runs; wants a quiet
machine all the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from tests.support.runner_driver import RunnerDriver
from worker.model.linear import DenseBackend, choose_linear_backend
from worker.model.sources import resolve_model
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

DECODES = ((1, 256), (8, 256), (8, 1024), (32, 256))
CHUNKS = (128, 512, 2048)


def best_of(repeats: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def decode_ms(driver: RunnerDriver, batch: int, context: int) -> float:
    """Milliseconds a step in which `batch` rows with about `context` tokens each decode one token."""
    shared = None
    for row in range(batch):
        prompt = [(7 * position) % 1000 + 20 for position in range(context)]
        driver.begin(row, prompt, prefix_slots=shared or ())
        driver.prefill(row, 512)
        shared = shared or driver.rows[row].slots[: context - 1]
    rows = list(range(batch))
    driver.decode(rows, 3)
    return 1e3 * best_of(15, lambda: driver.decode(rows, 1))


def prefill_rate(driver: RunnerDriver, chunk: int) -> float:
    """Tokens a second of one prompt in one step."""

    def run() -> None:
        driver.begin(0, [(7 * position) % 1000 + 20 for position in range(chunk)])
        driver.prefill(0)

    run()
    return chunk / best_of(3, run)


def print_packing_gain(threads: int) -> None:
    """A layer of 576 x 1536, as the demonstration model has, dense and packed."""
    torch.set_num_threads(threads)
    weight = torch.randn(1536, 576, dtype=torch.bfloat16)
    backends = (DenseBackend(), choose_linear_backend(torch.device("cpu"), torch.bfloat16))
    for rows in (1, 8, 32, 512):
        x = torch.randn(rows, 576, dtype=torch.bfloat16)
        times = []
        for backend in backends:
            layer = backend.prepare(weight, None)
            times.append(1e6 * best_of(50, lambda: [layer(x) for _ in range(10)]) / 10)  # noqa: B023
        named = ", ".join(f"{backend.name} {us:.0f} us" for backend, us in zip(backends, times, strict=True))
        print(f"threads {threads}, linear 576 -> 1536 bf16, {rows:4} rows: {named}")


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    path = resolve_model(arguments.model, print)
    for threads in map(int, arguments.threads.split(",")):
        print_packing_gain(threads)
        config = TorchRunnerConfig(
            model_path=str(path),
            dtype=arguments.dtype,
            num_threads=threads,
            max_total_tokens=150_000,
            chunked_prefill_size=2048,
            max_running_requests=32,
            max_context_tokens=4096,
        )
        runner = TorchRunner(config)
        driver = RunnerDriver(runner)
        print(f"threads {threads}, {path.name}, {driver.ready.dtype}")
        for batch, context in DECODES:
            print(f"  decode, batch {batch:2}, context {context:5}: {decode_ms(driver, batch, context):8.1f} ms a step")
        for chunk in CHUNKS:
            print(f"  prefill, {chunk:5} tokens: {prefill_rate(driver, chunk):8.0f} tokens/s")
        runner.close()


if __name__ == "__main__":
    main()

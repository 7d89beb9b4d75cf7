"""Speed of the torch runner on this machine: `python tests/bench/bench_torch_runner.py [MODEL] [--threads 1,2]`.

Prints, for each number of threads, milliseconds a decode step at several batch sizes and contexts and prompt tokens a
second at several chunk sizes, by the kernels in C and by torch alone, measured in turns. Beside each decode step stands
its ratio to the bound: the time to read all weights and the batch's KV once, at the bandwidth measured right after it.
Tells the best of several runs; wants a quiet machine all the same. Before each turn is a pause: OpenMP's threads spin
for milliseconds after torch has computed, on a core that the kernels' threads need.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.support.runner_driver import RunnerDriver
from worker.model.configuration import load_config
from worker.model.sources import resolve_model
from worker.runner.kernels.library import load_library
from worker.runner.torch_config import AttentionName, Dtype, TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

BACKENDS: tuple[AttentionName, ...] = ("cpu", "sdpa")
DECODES = ((1, 256), (1, 1024), (8, 256), (8, 1024), (32, 256), (32, 1024))
CHUNKS = (128, 512, 2048)
_PAUSE_S = 0.01


def best_of(repeats: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def start_decodes(driver: RunnerDriver, batch: int, context: int) -> None:
    """Prefills `batch` rows of about `context` tokens each, which share nothing."""
    for row in range(batch):
        driver.begin(row, [(7 * position + row) % 1000 + 20 for position in range(context)])
        driver.prefill(row, 512)
    driver.decode(list(range(batch)), 3)


def start_prompt(driver: RunnerDriver, chunk: int) -> None:
    """One prompt in one step."""
    driver.begin(0, [(7 * position) % 1000 + 20 for position in range(chunk)])
    driver.prefill(0)


def seconds_to_read(num_bytes: int) -> float:
    """Best time in which this machine reads so much memory, with torch's threads."""
    memory = torch.empty(num_bytes // 4, dtype=torch.float32)
    load_library().rf_prefer_large_pages(memory.data_ptr(), memory.nbytes)  # as the weights have
    memory.fill_(1)
    return best_of(5, memory.sum)


def in_turns(drivers: Sequence[RunnerDriver], repeats: int, run: Callable[[RunnerDriver], object]) -> list[float]:
    """Best seconds of each."""
    best = [float("inf")] * len(drivers)
    for _ in range(repeats):
        for index, driver in enumerate(drivers):
            time.sleep(_PAUSE_S)
            best[index] = min(best[index], best_of(1, lambda: run(driver)))  # noqa: B023
    return best


def print_decode(drivers: Sequence[RunnerDriver], batch: int, context: int, kv_bytes_per_token: int) -> None:
    """One line: each backend's milliseconds and its ratio to the bound."""
    for driver in drivers:
        start_decodes(driver, batch, context)
    rows = list(range(batch))
    times = in_turns(drivers, 20, lambda driver: driver.decode(rows, 1))
    weights = drivers[0].ready.memory.weights_bytes
    bound = seconds_to_read(weights + batch * context * kv_bytes_per_token)
    told = ", ".join(
        f"{name} {1e3 * time:6.1f} ms ({time / bound:4.1f} x bound)" for name, time in zip(BACKENDS, times, strict=True)
    )
    print(f"  decode, batch {batch:2}, context {context:5}: {told}")


def config_for(path: Path, threads: int, dtype: Dtype, attention: AttentionName) -> TorchRunnerConfig:
    """The same for all but the attention."""
    return TorchRunnerConfig(
        model_path=str(path),
        dtype=dtype,
        num_threads=threads,
        max_total_tokens=100_000,  # the driver takes new slots for every prompt and gives none back
        chunked_prefill_size=2048,
        max_running_requests=32,
        max_context_tokens=4096,
        attention=attention,
    )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    path = resolve_model(arguments.model, print)
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        runners = [TorchRunner(config_for(path, threads, arguments.dtype, name)) for name in BACKENDS]
        drivers = [RunnerDriver(runner) for runner in runners]
        dtype = drivers[0].ready.dtype
        print(f"threads {threads}, {path.name}, {dtype}")
        per_token = load_config(path).kv_bytes_per_token(getattr(torch, dtype).itemsize)
        for batch, context in DECODES:
            print_decode(drivers, batch, context, per_token)
        for chunk in CHUNKS:
            times = in_turns(drivers, 4, lambda driver: start_prompt(driver, chunk))  # noqa: B023
            told = ", ".join(f"{name} {chunk / time:6.0f}" for name, time in zip(BACKENDS, times, strict=True))
            print(f"  prefill, {chunk:5} tokens: {told} tokens/s")
        for runner in runners:
            runner.close()


if __name__ == "__main__":
    main()

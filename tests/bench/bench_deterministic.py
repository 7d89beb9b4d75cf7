"""What deterministic inference costs: `python tests/bench/bench_deterministic.py [MODEL] [--threads 1]`.

Prints tokens a second with the setting off and on, measured in turns, and what is kept of them: by the kernels in C,
which need nothing but sampling row by row, and by torch alone. Tells the best of several runs; wants a quiet machine
all the same. Set OMP_WAIT_POLICY=PASSIVE, as workers do, where the machine has other work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tests.bench.bench_torch_runner import in_turns, start_prompt
from tests.support.runner_driver import RunnerDriver
from worker.model.sources import resolve_model
from worker.runner.torch_config import AttentionName, Dtype, TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

KINDS: tuple[tuple[Dtype, AttentionName], ...] = (
    ("bfloat16", "cpu"),
    ("bfloat16", "sdpa"),
    ("float32", "cpu"),
    ("float32", "sdpa"),
)
CONTEXT = 256
CHUNK = 512
BATCHES = (1, 8, 32)


def driver_for(
    path: Path, dtype: Dtype, attention: AttentionName, threads: int, *, deterministic: bool
) -> RunnerDriver:
    """A loaded runner."""
    config = TorchRunnerConfig(
        model_path=str(path),
        dtype=dtype,
        max_total_tokens=60_000,
        chunked_prefill_size=CHUNK,
        max_running_requests=max(BATCHES),
        max_context_tokens=1024,
        num_threads=threads,
        attention=attention,
        deterministic=deterministic,
    )
    return RunnerDriver(TorchRunner(config))


def start_decodes(driver: RunnerDriver, batch: int, temperature: float) -> None:
    """Prefills rows that share nothing."""
    for row in range(batch):
        prompt = [(7 * position + row) % 1000 + 20 for position in range(CONTEXT)]
        driver.begin(row, prompt, temperature=temperature, top_p=0.9, seed=row)
        driver.prefill(row)
    driver.decode(list(range(batch)), 2)


def print_rates(
    what: str, drivers: list[RunnerDriver], num_tokens: int, repeats: int, run: Callable[[RunnerDriver], object]
) -> None:
    """One row of a table."""
    off, on = (num_tokens / seconds for seconds in in_turns(drivers, repeats, run))
    print(f"| {what} | {off:,.0f} | {on:,.0f} | {on / off:.2f} |", flush=True)


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    path = resolve_model(arguments.model, print)
    print("| | off, tokens/s | on, tokens/s | kept |\n|---|---|---|---|")
    for dtype, attention in KINDS:
        drivers = [
            driver_for(path, dtype, attention, arguments.threads, deterministic=deterministic)
            for deterministic in (False, True)
        ]
        name = f"{dtype}, {attention}"
        print_rates(f"{name}: prompt of {CHUNK}", drivers, CHUNK, 5, lambda driver: start_prompt(driver, CHUNK))
        for batch, temperature in ((1, 0.0), (8, 0.0), (32, 0.0), (32, 1.0)):
            for driver in drivers:
                start_decodes(driver, batch, temperature)
            rows = list(range(batch))
            how = "seeded" if temperature else "greedy"
            what = f"{name}: {how} decoding, batch {batch}"
            print_rates(what, drivers, batch, 20, lambda driver: driver.decode(rows, 1))  # noqa: B023
        for driver in drivers:
            driver.runner.close()


if __name__ == "__main__":
    main()

"""Speed of the torch runner on a GPU, with random weights: `python -m tests.gpu.figures [--layers 8] [--hidden 2048]`.

    decode     milliseconds a step on the device's clock, and between two steps, with the next one handed over before
               the result of the last is asked for, as a runner process does it; launched kernel by kernel, replayed
               from CUDA graphs, and so with tokens drawn by top_p; layers with kernels of Triton, and, for
               comparison, with torch's operations in their place
    launch     milliseconds that the host is busy with a step: where it exceeds the step, the device waits
    prefill    tokens a second of one prompt in one step, with both kinds of layers

`--device cpu` tries the script out, in a minute with `--layers 1 --hidden 64`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, get_args

import msgspec
import numpy as np
import torch

from radixfleet.clock import MonotonicClock
from tests.support.device_marks import QueuedOnCpu
from tests.support.runner_driver import RunnerDriver
from tests.support.scarce_memory import LoadedRunner
from tests.support.tiny_model import Architecture, tiny_model
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import QueuedTorchRunner

BATCHES = ((1, 1024), (8, 1024), (64, 1024), (256, 256))
"""Sequences and their contexts."""
DRAWN = ((8, 1024), (256, 256))
"""The same, with a temperature and top_p: what that adds to a step of the greedy ones is the sampler's."""
PROMPTS = (512, 2048, 8192)
WAYS = (("launched", False, True), ("graphs, torch's", True, False), ("graphs", True, True))
"""What a way is called, whether steps are replayed from CUDA graphs, and whether layers have kernels of Triton."""
STEPS = 60
SETTLED = 20
"""Steps that are not counted: kernels are compiled and clocks go up."""


class Planned(LoadedRunner):
    """Computes nothing: has plans made, which are then run as fast as the device takes them."""

    def __init__(self, runner: QueuedTorchRunner, ready: Ready) -> None:
        super().__init__(runner, ready)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        """Keep it."""
        self.plans.append(msgspec.structs.replace(plan, step=len(self.plans) + 1))
        nothing = np.zeros(plan.num_sequences, np.int32)
        return StepResult(plan.step, nothing, nothing.astype(np.bool_), 0.0, 0.0)


@dataclass(frozen=True)
class Ran:
    """What became of some plans."""

    results: Sequence[StepResult]
    launch_s: Sequence[float]


def run(runner: QueuedTorchRunner, plans: Sequence[StepPlan]) -> Ran:
    """Two in flight."""
    results, launch_s = [], []
    for index, plan in enumerate(plans):
        began_s = time.perf_counter()
        runner.enqueue(plan)
        launch_s.append(time.perf_counter() - began_s)
        if index:
            results.append(runner.collect())
    results.append(runner.collect())
    errors = [result.error for result in results if result.error]
    assert not errors, errors[0]
    return Ran(results, launch_s)


def decode(runner: QueuedTorchRunner, ready: Ready, batch: int, context: int, **values: Any) -> str:
    """The figures of `batch` sequences that decode at a context. `values`: fields of RowStart; greedy by default."""
    planned = Planned(runner, ready)
    driver = RunnerDriver(planned)
    for row in range(batch):
        driver.begin(row, [(7 * position + row) % 500 + 3 for position in range(context)], **values)
        driver.prefill(row, ready.capacity.chunked_prefill_size)
    num_prefills = len(planned.plans)
    driver.decode(range(batch), STEPS)
    ran = run(runner, planned.plans)
    results, launch_s = ran.results[num_prefills + SETTLED :], ran.launch_s[num_prefills + SETTLED :]
    step_ms = 1e3 * median(each.ended_s - each.started_s for each in results)
    gap_us = 1e6 * median(after.started_s - before.ended_s for before, after in pairwise(results))
    launch_ms = 1e3 * median(launch_s)
    rate = batch * 1e3 / (step_ms + gap_us / 1e3)
    return f"{step_ms:7.3f} ms + {gap_us:5.1f} us between, launch {launch_ms:6.3f} ms, {rate:8.0f} tokens/s"


def prefill(runner: QueuedTorchRunner, ready: Ready, num_tokens: int) -> str:
    """The figures of one prompt."""
    planned = Planned(runner, ready)
    driver = RunnerDriver(planned)
    for row in range(6):
        driver.begin(row, [(7 * position + row) % 500 + 3 for position in range(num_tokens)])
        driver.prefill(row)
    step_s = median(each.ended_s - each.started_s for each in run(runner, planned.plans).results[2:])
    return f"{1e3 * step_s:7.2f} ms, {num_tokens / step_s:8.0f} tokens/s"


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--architecture", default="qwen3", choices=get_args(Architecture))
    arguments = parser.parse_args()
    heads = max(4, arguments.hidden // 64)
    path = tiny_model(
        arguments.architecture,
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_heads=heads,
        num_kv_heads=heads // 4,
        max_context=16_384,
    )
    config = TorchRunnerConfig(
        model_path=str(path),
        device=arguments.device,
        dtype="bfloat16",
        device_memory_bytes=48 << 30 if arguments.device != "cpu" else 8 << 30,
        max_total_tokens=400_000,
        max_running_requests=256,
        chunked_prefill_size=8192,
    )
    kind = QueuedOnCpu if arguments.device == "cpu" else QueuedTorchRunner
    print(f"{arguments.layers} layers of {arguments.hidden}, bfloat16, {torch.get_num_threads()} threads")
    for way, cuda_graphs, fused in WAYS:
        changed = msgspec.structs.replace(config, cuda_graphs=cuda_graphs, fused_layers=fused)
        runner = kind(changed, MonotonicClock())
        ready = runner.load()
        for batch, context in BATCHES:
            print(f"decode {batch:3} at {context:5}, {way:16}: {decode(runner, ready, batch, context)}", flush=True)
        for batch, context in DRAWN if cuda_graphs and fused else ():
            figures = decode(runner, ready, batch, context, temperature=0.7, top_p=0.9)
            print(f"decode {batch:3} at {context:5}, {'drawn by top_p':16}: {figures}", flush=True)
        for num_tokens in PROMPTS if cuda_graphs else ():
            print(f"prefill {num_tokens:5},            {way:16}: {prefill(runner, ready, num_tokens)}", flush=True)
        runner.close()


if __name__ == "__main__":
    main()

"""What the separate runner process costs, and what overlap hides. Prints two tables; takes about 20 seconds.

    python tests/bench/bench_engine_wire.py

1. A step's way to a runner process that computes nothing and back: encode, socket, decode, result, decode.
2. The whole engine (front, engine, runner processes) on a simulated device, serial and overlapped: the device's idle
   time before a step while there was work (median; what the mean adds is other processes taking the cores), its share
   of the step, and what scheduling costs a step.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import numpy as np

from radixfleet.types import Grammar
from worker.core import codec
from worker.core.messages import Report, Submit
from worker.core.step import RowStart, StepPlan, StepResult
from worker.engine.config import EngineConfig
from worker.engine.executors import ProcessExecutor
from worker.engine.handle import Notice
from worker.engine.process import ProcessEngine
from worker.engine.runner_process import run_steps
from worker.engine.wire import FrameSocket
from worker.runner.sim import CostModel, SimRunnerConfig

ROUND_TRIPS = 2_000


class NoOpRunner:
    """Says token 1 to everything, in no time."""

    def prepare(self, grammar: Grammar) -> str:
        return ""

    def run(self, plan: StepPlan) -> StepResult:
        now_s = time.monotonic()
        tokens = np.ones(plan.num_sequences, dtype=np.int32)
        return StepResult(plan.step, tokens, np.zeros(plan.num_sequences, dtype=np.bool_), now_s, now_s)


def plan(num_rows: int, tokens_a_row: int, prefix: int = 0) -> StepPlan:
    """A step: decodes when there is a token a row, otherwise prompts after a cached prefix."""
    rows = np.arange(num_rows, dtype=np.int32)
    num_tokens = num_rows * tokens_a_row
    is_decode = tokens_a_row == 1
    starts_rows = tuple(
        RowStart(row, np.arange(prefix, dtype=np.int32), 0.0, 1.0, 0, 0.0, row, prefix + tokens_a_row, 0, (2,))
        for row in range(0 if is_decode else num_rows)
    )
    return StepPlan(
        step=1,
        starts_rows=starts_rows,
        rows=rows,
        starts=np.full(num_rows, prefix, dtype=np.int32),
        lengths=np.full(num_rows, tokens_a_row, dtype=np.int32),
        samples=np.ones(num_rows, dtype=np.bool_),
        relayed=np.full(num_rows, is_decode),
        input_ids=np.zeros(num_tokens, dtype=np.int32),
        slots=np.arange(num_tokens, dtype=np.int32),
    )


def round_trips() -> None:
    """The first table."""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [sys.executable, __file__, "runner", str(theirs.fileno())]
        runner = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
    end = FrameSocket(ours)
    executor = ProcessExecutor(end)
    print(f"{'step':34}{'bytes':>9}{'encode us':>11}{'decode us':>11}{'round trip us: p50':>20}{'p99':>7}")
    for name, step in [
        ("1 decode", plan(1, 1)),
        ("32 decodes", plan(32, 1)),
        ("256 decodes", plan(256, 1)),
        ("prompt of 8,192", plan(1, 8_192)),
        ("4 prompts of 2,048 after 32,768", plan(4, 2_048, prefix=32_768)),
    ]:
        data = codec.encode(step)
        times_s = []
        for _ in range(ROUND_TRIPS):
            began_s = time.perf_counter()
            executor.launch(step)
            while True:
                end.wait_readable()
                if executor.results():
                    break
            times_s.append(time.perf_counter() - began_s)
        encode_us, decode_us = timed_us(lambda s=step: codec.encode(s)), timed_us(lambda d=data: codec.decode_order(d))
        p50_us, p99_us = median(times_s) * 1e6, quantiles(times_s, n=100)[98] * 1e6
        print(f"{name:34}{len(data):9,}{encode_us:11.1f}{decode_us:11.1f}{p50_us:20.1f}{p99_us:7.1f}")
    end.close()
    runner.wait()


def timed_us(act: Callable[[], object]) -> float:
    """Median time of an act."""
    times_s = []
    for _ in range(500):
        began_s = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - began_s)
    return median(times_s) * 1e6


async def bubbles(*, overlap: bool, step_s: float, num_requests: int) -> None:
    """A line of the second table."""
    runner = SimRunnerConfig(
        kv_tokens=2**18, max_context_tokens=4096, cost=CostModel(step_s, 0.0, 0.0, 0.0), max_running_requests=256
    )
    engine = ProcessEngine(EngineConfig(runner=runner, overlap=overlap, log_level="error"))
    await engine.start()
    await engine.ready()
    prompt = np.arange(64, dtype=np.int32)
    new_tokens = int(2.0 / step_s)

    async def request(index: int) -> None:
        tokens = prompt + np.int32(index * 100)
        submit = Submit(engine.next_uid(), tokens, ("m",), 0.0, 1.0, 0, 0.0, 0, new_tokens, 0, (), 0)
        async for _ in engine.submit(submit):
            pass

    bubble_s: list[float] = []
    counters: dict[str, float] = {}

    def listen(notice: Notice) -> None:
        if isinstance(notice, Report):
            bubble_s.extend(notice.bubble_s)
            counters.update(notice.counters)

    engine.subscribe(listen)
    await asyncio.gather(*(request(index) for index in range(num_requests)))
    await engine.stop()
    bubble_us, mean_us = median(bubble_s) * 1e6, sum(bubble_s) / len(bubble_s) * 1e6
    scheduling_us = counters["scheduling_s"] / counters["steps"] * 1e6
    print(
        f"{'overlapped' if overlap else 'serial':12}{num_requests:5}{step_s * 1e3:9.0f}{bubble_us:14.0f}{mean_us:9.0f}"
        f"{bubble_us / (step_s * 1e6 + bubble_us):9.2%}{scheduling_us:15.0f}"
    )


def main() -> None:
    """Both tables."""
    round_trips()
    print(f"\n{'loop':12}{'rows':>5}{'step ms':>9}{'bubble us: p50':>14}{'mean':>9}{'share':>9}{'scheduling us':>15}")
    for num_requests in (1, 32, 128):
        for overlap in (False, True):
            asyncio.run(bubbles(overlap=overlap, step_s=0.01, num_requests=num_requests))


if __name__ == "__main__":
    if sys.argv[1:2] == ["runner"]:
        run_steps(NoOpRunner(), FrameSocket(socket.socket(fileno=int(sys.argv[2]))))
    else:
        main()

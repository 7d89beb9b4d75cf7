"""What the separate runner process costs: `python tests/bench/bench_engine_wire.py`.

A step's way to a runner process that computes nothing and back: encode, socket, decode, result, decode. What overlap
hides of it: `radixfleet bench engine`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles

import numpy as np

from radixfleet.types import Grammar
from worker.core import codec
from worker.core.step import RowStart, StepPlan, StepResult
from worker.engine.executors import ProcessExecutor
from worker.engine.runner_process import run_steps
from worker.engine.wire import FrameSocket

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
    row_starts = tuple(
        RowStart(row, np.arange(prefix, dtype=np.int32), 0.0, 1.0, 0, 0.0, row, prefix + tokens_a_row, 0, (2,))
        for row in range(0 if is_decode else num_rows)
    )
    return StepPlan(
        step=1,
        row_starts=row_starts,
        rows=rows,
        starts=np.full(num_rows, prefix, dtype=np.int32),
        lengths=np.full(num_rows, tokens_a_row, dtype=np.int32),
        samples=np.ones(num_rows, dtype=np.bool_),
        relayed=np.full(num_rows, is_decode),
        input_ids=np.zeros(num_tokens, dtype=np.int32),
        slots=np.arange(num_tokens, dtype=np.int32),
    )


def round_trips() -> None:
    """Print the table."""
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
        encode_us, decode_us = timed_us(partial(codec.encode, step)), timed_us(partial(codec.decode_order, data))
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["runner"]:
        run_steps(NoOpRunner(), FrameSocket(socket.socket(fileno=int(sys.argv[2]))))
    else:
        round_trips()

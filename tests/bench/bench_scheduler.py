"""What a step costs the scheduler, at 256 running and 1,000 waiting requests: `python tests/bench/bench_scheduler.py`.

Prompts of 1,524 tokens, 1,024 of them shared by one in sixteen; 400 new tokens each; two steps in flight; the KV pool
holds all that runs. CPU time of this process, so that other work on the machine counts for less. Takes half a minute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from radixfleet.clock import ManualClock
from tests.support.sim_worker import make_submit
from worker.runner.sim import SimRunner, SimRunnerConfig
from worker.scheduling.limits import Limits, Order
from worker.scheduling.scheduler import Scheduler

_STEPS = 600
_ORDERS: tuple[Order, ...] = ("fcfs", "lpm", "priority")


def timed(times_ms: list[float], call: Callable[[], object]) -> object:
    """Call, and note the CPU time that it took."""
    before = time.process_time()
    result = call()
    times_ms.append((time.process_time() - before) * 1e3)
    return result


def measure(order: Order, page_size: int) -> dict[str, list[float]]:
    """CPU times in ms of each submit, plan and commit."""
    config = SimRunnerConfig(kv_tokens=400_000, page_size=page_size, max_running_requests=256, cost=None)
    runner = SimRunner(config, ManualClock())
    scheduler = Scheduler(Limits.from_ready(runner.load(), order=order), ManualClock())
    random = np.random.default_rng(0)
    shared = [random.integers(0, 32_000, 1_024) for _ in range(16)]
    times: dict[str, list[float]] = {"submit": [], "plan": [], "commit": []}
    for uid in range(1_256):
        prompt = np.concatenate([shared[uid % 16], random.integers(0, 32_000, 500)])
        submit = make_submit(uid, prompt, 400)
        timed(times["submit"], lambda submit=submit: scheduler.submit(submit))
    launched: deque = deque()
    for _ in range(_STEPS):
        plan = timed(times["plan"], scheduler.plan)
        if plan is not None:
            launched.append(plan)
        if plan is None or len(launched) == 2:
            result = runner.run(launched.popleft())
            timed(times["commit"], lambda result=result: scheduler.commit(result))
            scheduler.drain()
    return times


def main() -> None:
    """Print a table."""
    print(f"{'order':10}{'page':>5}   {'act':8}{'p50 ms':>8}{'mean ms':>9}{'p99 ms':>8}")
    for order in _ORDERS:
        for page_size in (16, 1):
            for act, times_ms in measure(order, page_size).items():
                p50, p99 = np.quantile(times_ms, [0.5, 0.99])
                print(f"{order:10}{page_size:5}   {act:8}{p50:8.3f}{np.mean(times_ms):9.3f}{p99:8.3f}")


if __name__ == "__main__":
    main()

"""What the scheduler's own work costs, and how it grows. Prints three tables; takes about a minute.

    python tests/bench/bench_scheduler.py

No runner and no processes: each step's result is made up, so that all that is timed is the scheduler. Times are CPU
time of this thread, so that other work on the machine counts for less: medians, and the 90th percentile of the sum.

1. A decode step (plan, then commit) by requests that run and wait. "rows": the queue waits for a row; "memory": rows
   are free and the queue waits for memory, so that each step looks at the queue and forecasts the pool's peak anew.
2. Steps in which requests leave and others are admitted, four of 256 on average; prompts half and wholly cached.
3. The radix cache alone: match, and insert of a prompt computed at once and chunk by chunk.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median, quantiles

import numpy as np

from radixfleet.clock import MonotonicClock
from worker.core.messages import Submit
from worker.core.step import StepPlan, StepResult
from worker.memory.page_allocator import PageAllocator, slots_of
from worker.memory.radix_cache import RadixCache
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler

PAGE = 16
STEPS = 300
LONG = 100_000
"""max_new_tokens of requests that are to run all the time."""

TIMES = f"{'plan us':>9}{'commit':>9}{'both':>9}{'p90':>9}"


@dataclass(frozen=True)
class Times:
    """Microseconds a step."""

    plan: list[float]
    commit: list[float]

    def row(self) -> str:
        """Median plan, commit and their sum, and the sum's 90th percentile."""
        both = [p + c for p, c in zip(self.plan, self.commit, strict=True)]
        return f"{median(self.plan):9.0f}{median(self.commit):9.0f}{median(both):9.0f}{quantiles(both, n=10)[8]:9.0f}"


def submit(uid: int, prompt: np.ndarray, max_new_tokens: int) -> Submit:
    """A greedy request."""
    return Submit(uid, prompt.astype(np.int32), ("m",), 0.0, 1.0, 0, 0.0, 0, max_new_tokens, 0, (2,), 0)


def prompts(count: int, length: int, seed: int) -> list[np.ndarray]:
    """Prompts of which half is shared, eight to a prefix."""
    random = np.random.default_rng(seed)
    prefixes = random.integers(10, 30_000, ((count + 7) // 8, length // 2))
    tails = random.integers(10, 30_000, (count, length - length // 2))
    return [np.concatenate([prefixes[index // 8], tail]) for index, tail in enumerate(tails)]


def result_of(plan: StepPlan) -> StepResult:
    """Token 5 for everybody."""
    tokens = np.full(plan.num_sequences, 5, dtype=np.int32)
    return StepResult(plan.step, tokens, np.zeros(plan.num_sequences, dtype=np.bool_), 0.0, 0.0)


def turn(scheduler: Scheduler, times: Times | None = None) -> None:
    """Plan and commit one step."""
    began = time.thread_time()
    plan = scheduler.plan()
    planned = time.thread_time()
    assert plan is not None
    result = result_of(plan)
    launched = time.thread_time()
    scheduler.commit(result)
    scheduler.drain()
    if times is not None:
        times.plan.append((planned - began) * 1e6)
        times.commit.append((time.thread_time() - launched) * 1e6)


def filled(running: int, waiting: int, length: int, *, rows: int, pool_tokens: int) -> Scheduler:
    """A scheduler with that many requests decoding, and waiting."""
    context = length + LONG + PAGE
    scheduler = Scheduler(Limits(pool_tokens // PAGE, PAGE, rows, 8192, context, order="lpm"), MonotonicClock())
    for uid, prompt in enumerate(prompts(running, length, seed=1)):
        scheduler.submit(submit(uid, prompt, LONG))
    while scheduler.load().outstanding_prompt_tokens:
        turn(scheduler)
    for uid, prompt in enumerate(prompts(waiting, length, seed=2), start=running):
        scheduler.submit(submit(uid, prompt, 1_000))
    return scheduler


def decode_steps() -> None:
    """The first table."""
    print(f"{'running':>8}{'waiting':>9}{'prompt':>9}  {'queue waits for':16}{TIMES}")
    for running, waiting, length in [
        (1, 0, 4096),
        (16, 0, 4096),
        (64, 0, 4096),
        (256, 0, 4096),
        (1024, 0, 4096),
        (1, 1000, 4096),
        (16, 1000, 4096),
        (64, 1000, 4096),
        (256, 100, 4096),
        (256, 1000, 1024),
        (256, 1000, 4096),
        (256, 1000, 16384),
        (1024, 1000, 4096),
        (16, 32, 131072),
    ]:
        for lacking in ("rows", "memory") if waiting else ("-",):
            rows = running if lacking == "rows" else running + 64
            pool = running * (length + LONG) + PAGE
            scheduler = filled(running, waiting, length, rows=rows, pool_tokens=pool)
            times = Times([], [])
            for _ in range(STEPS):
                turn(scheduler, times)
            num_running = scheduler.load().running_requests
            print(f"{num_running:8}{waiting:9}{length:9}  {lacking:16}{times.row()}")


def admissions() -> None:
    """The second table."""
    print(f"\n{'running':>8}{'waiting':>9}{'prompt':>9}  {'cached':16}{TIMES}")
    for running, waiting, length in [(64, 200, 1024), (256, 200, 4096), (256, 1000, 4096), (16, 32, 131072)]:
        for kind in ("half", "whole"):
            print(f"{running:8}{waiting:9}{length:9}  {kind:16}{churn(running, waiting, length, kind).row()}")


def churn(running: int, waiting: int, length: int, kind: str) -> Times:
    """Steps in which requests leave (after 33 to 96 tokens) and others come in from a queue that is kept full."""
    context = length + 128
    pool_pages = (running + 40) * context // PAGE
    scheduler = Scheduler(Limits(pool_pages, PAGE, running, 8192, context, order="lpm"), MonotonicClock())
    texts = prompts(running if kind == "whole" else running + waiting + 1_000, length, seed=1)
    num_submitted = 0
    times = Times([], [])
    for step in range(256):
        while scheduler.load().waiting_requests < waiting or not num_submitted:
            prompt = texts[num_submitted % len(texts)]
            scheduler.submit(submit(num_submitted, prompt, 33 + num_submitted % 64))
            num_submitted += 1
        turn(scheduler, times if step >= 128 else None)
    return times


def cache_alone() -> None:
    """The third table."""
    print(f"\n{'tokens':>8}{'match us':>10}{'insert':>9}{'in chunks of 2,048':>20}{'evict':>9}")
    for length in (1024, 4096, 16384, 131072):
        tokens = np.random.default_rng(0).integers(0, 30_000, length).astype(np.int32)
        match_us, insert_us, chunks_us, evict_us = [], [], [], []
        for _ in range(50):
            allocator = PageAllocator(length // PAGE + 1, PAGE)
            pages = allocator.allocate(length // PAGE)
            assert pages is not None
            slots = slots_of(pages, PAGE)
            for chunk, into in ((length, insert_us), (2048, chunks_us)):
                cache = RadixCache(allocator)
                handle = cache.lock(cache.match(("m",), tokens))
                began = time.thread_time()
                for end in range(min(chunk, length), length + 1, chunk):
                    cache.insert(handle, tokens[:end], slots[:end])
                into.append((time.thread_time() - began) * 1e6)
            began = time.thread_time()
            cache.match(("m",), tokens)
            match_us.append((time.thread_time() - began) * 1e6)
            cache.unlock(handle)
            began = time.thread_time()
            cache.evict(length // PAGE)
            evict_us.append((time.thread_time() - began) * 1e6)
        print(
            f"{length:8}{median(match_us):10.0f}{median(insert_us):9.0f}{median(chunks_us):20.0f}{median(evict_us):9.0f}"
        )


if __name__ == "__main__":
    gc.freeze()
    decode_steps()
    admissions()
    cache_alone()

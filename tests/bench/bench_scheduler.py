"""What the scheduler's own work costs, and how it grows. Prints three tables; takes about two minutes.

    python tests/bench/bench_scheduler.py [--only decode churn cache] [--steps 400]
    python tests/bench/bench_scheduler.py --against ../other-checkout [--rounds 5]

No runner and no processes: each step's result is made up, so that all that is timed is the scheduler. Times are CPU
time of this thread, so that other work on the machine counts for less (it still slows memory): medians and 99th
percentiles of what `plan`, `commit` and `drain` take together. The first line says how much a fixed loop of about a
millisecond varies on this machine: a 99th percentile no further from its median than the loop's is the machine's.

decode  Steps in which everybody decodes and nobody comes or ends, by requests that run and wait. "rows": the queue
        waits for a row; "memory": rows are free and the queue waits for memory, so that each step looks at it.
churn   Requests that end and others that take their places, from a queue that is kept full; prompts are cached by half
        or whole. Steps are told apart by what happened in them: nothing, ends, admissions, or both; "each" is how many
        of either such a step had on average. "report" is what the engine's report asks for, every fourth step.
cache   The radix cache alone: match, insert of a prompt computed at once and chunk by chunk, and eviction.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from radixfleet.clock import MonotonicClock
from worker.core.messages import Submit
from worker.core.step import StepPlan, StepResult
from worker.memory.page_allocator import PageAllocator
from worker.memory.radix_cache import RadixCache
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler

PAGE = 16
LONG = 100_000
"""max_new_tokens of requests that are to run all the time."""
REPORT_EVERY = 4
"""Steps from one of the engine's reports to the next: 50 ms, with steps of 12."""
COMPARED = [(256, 1000, 4096, 64, "half"), (256, 1000, 4096, 64, "whole"), (256, 1000, 4096, 1024, "half")]
"""What `--against` runs: rows of the second table."""


@dataclass(slots=True)
class Step:
    """One step's cost, and what happened in it."""

    plan_us: float
    commit_us: float
    admitted: int
    ended: int
    report_us: float | None = None
    """Where one was made after the step; not in `us`."""

    @property
    def us(self) -> float:
        """Both together."""
        return self.plan_us + self.commit_us


def p99(values: list[float]) -> float:
    """The 99th percentile; the largest of fewer than a hundred."""
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


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


def turn(scheduler: Scheduler, steps: list[Step] | None = None) -> None:
    """Plan and commit one step."""
    began = time.thread_time()
    plan = scheduler.plan()
    planned = time.thread_time()
    assert plan is not None
    result = result_of(plan)
    launched = time.thread_time()
    scheduler.commit(result)
    told = scheduler.drain()
    committed = time.thread_time()
    if steps is not None:
        ended = len(told.ended) if told is not None else 0
        steps.append(Step((planned - began) * 1e6, (committed - launched) * 1e6, len(plan.row_starts), ended))


def report(scheduler: Scheduler) -> float:
    """What the engine asks for its report; microseconds."""
    began = time.thread_time()
    scheduler.load()
    scheduler.cache.block_events.drain()
    return (time.thread_time() - began) * 1e6


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


def decode_steps(num_steps: int) -> None:
    """The first table."""
    columns = f"{'plan us':>9}{'commit':>9}{'both p50':>10}{'p99':>9}"
    print(f"{'running':>8}{'waiting':>9}{'prompt':>9}  {'queue waits for':16}{columns}")
    for running, waiting, length in [
        (1, 0, 4096),
        (16, 0, 4096),
        (64, 0, 4096),
        (256, 0, 4096),
        (1024, 0, 4096),
        (1, 1000, 4096),
        (64, 1000, 4096),
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
            steps: list[Step] = []
            for _ in range(num_steps):
                turn(scheduler, steps)
            plan, commit = median(step.plan_us for step in steps), median(step.commit_us for step in steps)
            both = [step.us for step in steps]
            times = f"{plan:9.0f}{commit:9.0f}{median(both):10.0f}{p99(both):9.0f}"
            print(f"{scheduler.load().running_requests:8}{waiting:9}{length:9}  {lacking:16}{times}")


def churns(num_steps: int) -> None:
    """The second table."""
    columns = f"{'of':>6}{'each':>6}{'plan us':>9}{'commit':>9}{'both p50':>10}{'p99':>9}{'report':>9}"
    print(f"\n{'running':>8}{'waiting':>9}{'prompt':>9}{'output':>8}  {'cached':8}{'steps with':12}{columns}")
    for running, waiting, length, output in [
        (1, 1000, 4096, 64),
        (16, 1000, 4096, 64),
        (64, 1000, 4096, 64),
        (256, 1000, 4096, 64),
        (256, 1000, 4096, 256),
        (256, 1000, 4096, 1024),
        (1024, 1000, 1024, 512),
        (1024, 1000, 4096, 512),
        (64, 1000, 32768, 256),
        (16, 32, 131072, 64),
    ]:
        for kind in ("half", "whole"):
            steps = churn(running, waiting, length, output, kind, num_steps)
            report_us = median(step.report_us for step in steps if step.report_us is not None)
            for name, some in by_event(steps).items():
                each = each_of(name, some)
                plan, commit = median(step.plan_us for step in some), median(step.commit_us for step in some)
                both = [step.us for step in some]
                columns = f"{len(some):6}{each:6.1f}{plan:9.0f}{commit:9.0f}{median(both):10.0f}{p99(both):9.0f}"
                print(f"{running:8}{waiting:9}{length:9}{output:8}  {kind:8}{name:12}{columns}{report_us:9.0f}")


def by_event(steps: list[Step]) -> dict[str, list[Step]]:
    """Steps by what happened in them; a kind that is rarer than one in fifty says nothing and is left out."""
    kinds: dict[str, list[Step]] = {"nothing": [], "ends": [], "admissions": [], "both": []}
    for step in steps:
        kinds[list(kinds)[bool(step.ended) + 2 * bool(step.admitted)]].append(step)
    return {name: some for name, some in kinds.items() if 50 * len(some) >= len(steps)}


def churn(running: int, waiting: int, length: int, output: int, kind: str, num_steps: int) -> list[Step]:
    """Steps in which requests leave, after `output` tokens or half more or less, and others come in."""
    context = length + 2 * output
    pool_pages = (running + min(running, 32) + 8) * context // PAGE
    scheduler = Scheduler(Limits(pool_pages, PAGE, running, 8192, context, order="lpm"), MonotonicClock())
    texts = prompts(max(running, 16) if kind == "whole" else min(running + waiting + 1_000, 2**23 // length), length, 1)
    num_submitted = 0

    def fill_queue() -> None:
        nonlocal num_submitted
        while scheduler.load().waiting_requests < waiting:
            new_tokens = output // 2 + num_submitted * 37 % (output + 1)
            scheduler.submit(submit(num_submitted, texts[num_submitted % len(texts)], new_tokens))
            num_submitted += 1

    fill_queue()
    steps: list[Step] = []
    while scheduler.counters.admitted_requests < 2 * running:  # until those that began together have spread
        turn(scheduler)
        fill_queue()
    for index in range(num_steps):
        turn(scheduler, steps)
        if index % REPORT_EVERY == 0:
            steps[-1].report_us = report(scheduler)
        fill_queue()
    return steps


def compare(other: Path, num_steps: int, rounds: int) -> None:
    """Rows of the second table by another checkout's code and by that here, in alternation, each in a process.

    A case has the same steps whenever it runs, so each step counts with the least time that it took in any round: what
    other work on the machine added is left out, and a hundredth of a difference shows.
    """
    here = Path(__file__).resolve().parents[2]
    columns = f"{'of':>6}{'each':>6}{'other us':>10}{'p99':>7}{'here us':>9}{'p99':>7}{'ratio':>7}"
    print(f"{'running':>8}{'output':>8}  {'cached':8}{'steps with':12}{columns}")
    for case in COMPARED:
        told: dict[Path, list[list[Step]]] = {other.resolve(): [], here: []}
        for number in range(rounds):
            for tree in list(told)[:: -1 if number % 2 else 1]:
                told[tree].append(_steps_of(tree, case, num_steps))
        theirs, ours = (by_event(_quickest(runs)) for runs in told.values())
        for name, some in ours.items():
            before, after = ([step.us for step in steps] for steps in (theirs.get(name, []), some))
            if not before:
                continue
            times = (
                f"{sum(before) / len(before):10.0f}{p99(before):7.0f}{sum(after) / len(after):9.0f}{p99(after):7.0f}"
            )
            ratio = sum(after) / len(after) / (sum(before) / len(before))
            row = f"{len(some):6}{each_of(name, some):6.1f}{times}{ratio:7.2f}"
            print(f"{case[0]:8}{case[3]:8}  {case[4]:8}{name:12}{row}", flush=True)


def _steps_of(tree: Path, case: tuple[int, int, int, int, str], num_steps: int) -> list[Step]:
    """What a checkout's code took for each step of a case."""
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'proto'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--steps", str(num_steps), "--one", json.dumps(case)]
    told = subprocess.run(command, env=environment, check=True, capture_output=True)
    return [Step(*step) for step in json.loads(told.stdout)]


def _quickest(runs: list[list[Step]]) -> list[Step]:
    """Each step as in the run in which it took the least time."""
    return [min(same, key=lambda step: step.us) for same in zip(*runs, strict=True)]


def each_of(name: str, some: list[Step]) -> float:
    """How many requests came, ended or each of both in such a step."""
    return sum(step.admitted + step.ended for step in some) / len(some) / (2 if name == "both" else 1)


def tell_noise() -> None:
    """The first line."""
    times = []
    for _ in range(1_000):
        began = time.thread_time()
        for _ in range(30_000):
            pass
        times.append((time.thread_time() - began) * 1e6)
    print(f"a fixed loop on this machine: {median(times):.0f} us, p99 {p99(times):.0f}\n", flush=True)


def cache_alone() -> None:
    """The third table."""
    print(f"\n{'tokens':>8}{'match us':>10}{'insert':>9}{'in chunks of 2,048':>20}{'evict':>9}")
    for length in (1024, 4096, 16384, 131072):
        tokens = np.random.default_rng(0).integers(0, 30_000, length).astype(np.int32)
        match_us: list[float] = []
        insert_us: list[float] = []
        chunks_us: list[float] = []
        evict_us: list[float] = []
        for _ in range(50):
            allocator = PageAllocator(length // PAGE + 1, PAGE)
            pages = allocator.allocate(length // PAGE)
            assert pages is not None
            for chunk, into in ((length, insert_us), (2048, chunks_us)):
                cache = RadixCache(allocator)
                handle = cache.lock(cache.match(("m",), tokens))
                began = time.thread_time()
                for end in range(min(chunk, length), length + 1, chunk):
                    cache.insert(handle, tokens[:end], pages)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ("decode", "churn", "cache")
    parser.add_argument("--only", nargs="+", choices=tables, default=tables, help="which tables to print")
    parser.add_argument("--steps", type=int, default=400, help="steps timed for each row")
    parser.add_argument("--against", type=Path, help="another checkout to compare with, instead of the tables")
    parser.add_argument("--rounds", type=int, default=5, help="how often each of the two is run")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    gc.freeze()
    if arguments.one is not None:
        print(json.dumps([astuple(step) for step in churn(*arguments.one, arguments.steps)]))
        return
    tell_noise()
    if arguments.against is not None:
        compare(arguments.against, arguments.steps, arguments.rounds)
        return
    if "decode" in arguments.only:
        decode_steps(arguments.steps)
    if "churn" in arguments.only:
        churns(arguments.steps)
    if "cache" in arguments.only:
        cache_alone()


if __name__ == "__main__":
    main()

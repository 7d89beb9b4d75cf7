"""What a choice costs the router: `python tests/bench/bench_router_choice.py`.

Wall time of one thread in bursts of a few requests, the best of many, so that other work on the machine matters little.
A choice is made of a fleet in which one worker has changed since the last one, as it has behind every booking. Beside
it stand the same while one worker drains, hashing, taking in that change (a new view of the worker included), and
booking.
"""

from __future__ import annotations

import argparse
import itertools
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, seed_hash
from radixfleet.types import HashArray, WorkerId, WorkerStatus
from router.fleet_view import FleetView
from router.index import Sketch
from router.index.sketch import NO_BLOCKS
from router.policies import make_policy
from router.view import RequestView, WorkerView
from tests.support.views import change as change_view

BURST = 4
BURSTS = 300
ROUNDS = 7
GROUPS = 64
CAPACITY_BLOCKS = 8_000


def burst_us(action: Callable[[HashArray], object], asked: Sequence[HashArray]) -> float:
    """Microseconds that `action` takes for one of `asked`, in the best of many bursts."""
    best_s = float("inf")
    for number in range(BURSTS):
        part = [asked[(number * BURST + index) % len(asked)] for index in range(BURST)]
        start_s = time.perf_counter()
        for hashes in part:
            action(hashes)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s / BURST * 1e6


def best_us(action: Callable[[], object], repeats: int) -> float:
    """CPU microseconds that one of `repeats` in `action` takes, in the best of the rounds."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.process_time()
        action()
        best_s = min(best_s, time.process_time() - start_s)
    return best_s / repeats * 1e6


def prompts(num_blocks: int, count: int, rng: np.random.Generator) -> list[HashArray]:
    """Three quarters of each prompt is shared within its group."""
    shared = rng.integers(0, 2**63, (GROUPS, num_blocks * 3 // 4), dtype=np.uint64)
    own = rng.integers(0, 2**63, (count, num_blocks - shared.shape[1]), dtype=np.uint64)
    return [np.concatenate([shared[i % GROUPS], own[i]]) for i in range(count)]


def worker_view(slot: int, random: Random) -> WorkerView:
    """A worker with something to do."""
    return WorkerView(
        slot=slot,
        worker_id=WorkerId(f"worker-{slot}"),
        running_requests=random.randrange(40),
        max_running_requests=64,
        outstanding_prompt_tokens=random.randrange(9_000),
        kv_tokens=CAPACITY_BLOCKS * BLOCK_TOKENS,
        kv_protected_tokens=random.randrange(300_000),
        sketch_blocks=random.randrange(CAPACITY_BLOCKS * 3 // 4, CAPACITY_BLOCKS),
    )


def bench_choice(num_workers: int, num_blocks: int) -> None:
    """A fleet where each group's prefix lies on two workers or so."""
    rng, random, policy = np.random.default_rng(0), Random(0), make_policy("min_cost")
    sketch = Sketch()
    for _ in range(num_workers):
        sketch.set_capacity(sketch.attach(), CAPACITY_BLOCKS)
    views = [worker_view(slot, random) for slot in range(num_workers)]
    known = prompts(num_blocks, 4 * GROUPS, rng)
    for number, hashes in enumerate(known):
        slot = (number % GROUPS + random.choice([0, 0, 0, 7])) % num_workers
        sketch.end(sketch.book(slot, hashes, num_blocks * BLOCK_TOKENS))
    asked = [np.concatenate([h[: num_blocks - 4], rng.integers(0, 2**63, 4, dtype=np.uint64)]) for h in known]
    tokens = rng.integers(0, 32_000, num_blocks * BLOCK_TOKENS, dtype=np.uint32)
    seed = seed_hash(("model", "", ""))

    fleet, turn = FleetView(views), itertools.count()
    others = [worker_view(slot, random) for slot in range(num_workers)]

    def choice_us(fleet: FleetView) -> float:
        """Among workers of which the last one's figures stay as they are."""

        def change_one(_: HashArray) -> None:
            number = next(turn)
            slot = number % (num_workers - 1)
            change_view(fleet, slot, (views, others)[number // (num_workers - 1) % 2][slot])

        def choose(hashes: HashArray) -> None:
            change_one(hashes)
            matched = sketch.match(hashes)
            users, used_for_s = sketch.users(hashes, matched), sketch.used_for_s(hashes, matched)
            view = RequestView(num_blocks * BLOCK_TOKENS, hashes, matched, users, used_for_s)
            policy.rank(view, fleet, random)

        return burst_us(choose, asked) - burst_us(change_one, asked)

    def change(_: HashArray) -> None:
        slot = next(turn) % num_workers
        change_view(fleet, slot, worker_view(slot, random))

    def book(hashes: HashArray) -> None:
        sketch.end(sketch.book(next(turn) % num_workers, hashes, num_blocks * BLOCK_TOKENS))

    match_us = burst_us(sketch.match, asked)
    choose_us = choice_us(fleet)
    draining = replace(views[-1], status=WorkerStatus.DRAINING)
    figures = (
        burst_us(lambda _: chain_hashes(seed, tokens), asked),
        match_us,
        choose_us - match_us,
        choose_us,
        choice_us(FleetView([*views[:-1], draining])),
        burst_us(change, asked),
        burst_us(book, asked),
    )
    print(f"{num_workers:7d} {num_blocks * BLOCK_TOKENS:7d}", *(f"{figure:12.1f}" for figure in figures))


def bench_reports() -> None:
    """Deltas of 2,000 blocks, and a digest of 100,000, on a sketch of 16 workers."""
    rng, total, chunk = np.random.default_rng(1), 100_000, 2_000
    hashes = rng.integers(0, 2**63, total, dtype=np.uint64)
    sketch = Sketch()
    for slot in range(16):
        sketch.set_capacity(sketch.attach(), total)
        sketch.apply_digest(slot, 1, 0, NO_BLOCKS)
    sequence = 0

    def deltas(*, adds: bool) -> None:
        nonlocal sequence
        for start in range(0, total, chunk):
            sequence += 1
            part = hashes[start : start + chunk]
            assert sketch.apply_delta(0, 1, sequence, NO_BLOCKS if adds else part, part if adds else NO_BLOCKS)

    added_us, evicted_us = float("inf"), float("inf")
    for _ in range(ROUNDS):
        start_s = time.process_time()
        deltas(adds=True)
        middle_s = time.process_time()
        deltas(adds=False)
        added_us = min(added_us, (middle_s - start_s) / total * 1e6)
        evicted_us = min(evicted_us, (time.process_time() - middle_s) / total * 1e6)
    ordered = np.sort(hashes)

    def replace_all() -> None:
        sketch.wipe(0)
        sketch.apply_digest(0, 1, 0, ordered)

    digest_us = best_us(replace_all, 1)
    print(f"deltas: {1 / added_us:.2f} M added and {1 / evicted_us:.2f} M evicted blocks/s")
    print(f"a digest of {total:,} blocks, the old one wiped first: {digest_us / 1e3:.0f} ms")


def bench_memory() -> None:
    """Bytes a block, for prompts held by one worker and by four."""
    for holders in (1, 4):
        rng, total, num_blocks = np.random.default_rng(2), 64_000, 64
        tracemalloc.start()
        sketch = Sketch()
        for _ in range(16):
            sketch.set_capacity(sketch.attach(), total)
        for number in range(total // num_blocks):
            hashes = rng.integers(0, 2**63, num_blocks, dtype=np.uint64)
            for holder in range(holders):
                sketch.end(sketch.book((number + holder) % 16, hashes, num_blocks * BLOCK_TOKENS))
        size_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        print(f"memory: {size_bytes / (total * holders):.0f} bytes a block and worker, {holders} workers a block")


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", action="store_true", help="the first table alone")
    arguments = parser.parse_args()
    print("microseconds          hashing        match        score  match+score      one out  new figures     book+end")
    print("workers  tokens")
    for num_workers in (2, 4, 16, 64, 1_000):
        for num_blocks in (64, 512):
            bench_choice(num_workers, num_blocks)
    if not arguments.choices:
        bench_reports()
        bench_memory()


if __name__ == "__main__":
    main()

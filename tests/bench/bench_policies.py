"""Every policy on every kind of load, in virtual time: `python tests/bench/bench_policies.py [--trace mooncake.jsonl]`.

Workers are the cost model of `tests.support.fleet_simulation`. `--trace` takes a file of Mooncake's form (one JSON
object a line: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks) and replays its beginning.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS
from router.policies import POLICY_NAMES, make_policy
from tests.support.fleet_simulation import Job, Machine, Simulation, shared_prefix_jobs

TRACE_BLOCK = 512


def trace_jobs(path: Path, *, count: int, speed: float) -> list[Job]:
    """The first `count` requests of a trace, `speed` times as fast."""
    steps = np.arange(TRACE_BLOCK // BLOCK_TOKENS, dtype=np.uint64)
    jobs = []
    with path.open() as lines:
        for line in islice(lines, count):
            entry = json.loads(line)
            ids = np.array(entry["hash_ids"], dtype=np.uint64)
            # Each id names a whole prefix, so any distinct numbers for the parts of its block will do.
            hashes = ((ids[:, None] * np.uint64(len(steps)) + steps) * np.uint64(0x9E3779B97F4A7C15)).reshape(-1)
            tokens = entry["input_length"]
            outputs = max(1, entry["output_length"])
            jobs.append(Job(entry["timestamp"] / 1e3 / speed, hashes[: tokens // BLOCK_TOKENS], tokens, outputs))
    return jobs


def run(title: str, jobs: Sequence[Job], machines: Sequence[Machine]) -> None:
    """One table."""
    print(f"\n{title}: {len(jobs)} requests, {len(machines)} workers")
    print(
        f"{'policy':14s} {'hit':>6s} {'TTFT mean':>10s} {'p99 s':>7s} {'latency s':>10s} {'total s':>8s}  most/fewest"
    )
    for name in POLICY_NAMES:
        result = Simulation(make_policy(name), machines).serve(jobs)
        shares = result.requests_by_slot
        print(
            f"{name:14s} {result.hit_rate:6.3f} {result.mean_ttft_s:10.2f} {result.p99_ttft_s:7.2f} "
            f"{result.mean_latency_s:10.2f} {result.duration_s:8.1f}  {max(shares)}/{min(shares)}",
            flush=True,
        )


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    trace = parser.parse_args().trace
    small = Machine(kv_blocks=1_000, max_running_requests=16)
    groups = {"groups": 64, "jobs": 1_024, "prefix_blocks": 32, "own_tokens": 128, "output_tokens": 256}
    run("shared prefixes, all at once", shared_prefix_jobs(**groups), [Machine(kv_blocks=1_000)] * 8)
    run("shared prefixes, Zipf, 30/s", shared_prefix_jobs(**groups, rate=30, zipf=1.0), [small] * 8)
    run("shared prefixes, Zipf, 60/s: over capacity", shared_prefix_jobs(**groups, rate=60, zipf=1.0), [small] * 8)
    tight = {"groups": 128, "jobs": 2_048, "prefix_blocks": 32, "own_tokens": 128, "output_tokens": 64, "rate": 40}
    run(
        "prefixes that do not fit, 40/s",
        shared_prefix_jobs(**tight),
        [Machine(kv_blocks=410, max_running_requests=16)] * 8,
    )
    hot = {"groups": 1, "jobs": 1_000, "prefix_blocks": 64, "own_tokens": 128, "output_tokens": 256, "rate": 40}
    run("one hot prefix, 40/s", shared_prefix_jobs(**hot), [Machine(kv_blocks=4_000)] * 4)
    cold = {"groups": 600, "jobs": 600, "prefix_blocks": 32, "own_tokens": 128, "output_tokens": 128, "rate": 12}
    run("nothing in common, 12/s", shared_prefix_jobs(**cold), [Machine(kv_blocks=4_000)] * 4)
    if trace:
        large = Machine(kv_blocks=30_000, max_running_requests=256, chunk_tokens=8_192)
        run("trace, twice as fast", trace_jobs(trace, count=3_000, speed=2.0), [large] * 8)


if __name__ == "__main__":
    main()

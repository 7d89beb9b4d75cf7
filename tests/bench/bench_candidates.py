"""Candidates for the default routing score, in the lab.

python tests/bench/bench_candidates.py [WORKERS [LOAD [WORKLOAD,...]]]
"""

from __future__ import annotations

import sys

from deploy.lab.comparison import compare
from deploy.lab.experiment import Experiment
from deploy.lab.simulation import prepare
from loadtest.statistics import Objective
from router.policies import make_policy
from tests.bench.candidate_policies import (
    AffinityGate,
    Dealt,
    TwoHashes,
    backlog,
    discounted,
    falling,
    predicted_ttft,
    product,
    relative,
    shape,
    weighted,
)

WORKLOADS = (
    "shared-prefix",
    "zipf",
    "hot-prefix",
    "working-set-0.75",
    "working-set-1.5",
    "chat",
    "bursts",
    "zero-reuse",
    "published",
)


def main() -> None:
    """A table a workload: hit rate, mean and p99 TTFT, output tokens a second."""
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    load = float(sys.argv[2]) if len(sys.argv) > 2 else 0.8
    wanted = sys.argv[3].split(",") if len(sys.argv) > 3 else WORKLOADS
    for workload in wanted:
        _compare(workload, workers, load)


def _compare(workload: str, workers: int, load: float) -> None:
    policies = [make_policy(name) for name in ("min_cost", "sglang", "linear", "round_robin")]
    policies += [backlog(0.1), backlog(0.3), backlog(1.0), falling(1.0), product(), predicted_ttft()]
    policies += [AffinityGate(), TwoHashes(), relative(0.2, 1, 8)]
    policies += [weighted(0.2, 1 / 32), weighted(0.2, 1 / 16), weighted(0.2, 1 / 8)]
    policies += [discounted("linear"), discounted("squares"), discounted("none")]
    policies += [discounted("hyperbola", 3, queue=1, patience=3, requests=tokens) for tokens in (5, 20)]
    policies += [shape(power=1, batch=0.5), shape(power=2, batch=2), shape(place=0)]
    if workload == "published":
        # All at once, on the fleet that the experiment was made on: `workers` and `load` do not count.
        experiment = Experiment(workload, workers=8, gpus="a100-8b")
        policies.append(Dealt())  # where each group's prompts share their first block with no other's
    else:
        experiment = Experiment(workload, workers=workers, load=load, kv_tokens=100_000, requests=100 * workers)
    arrivals = experiment.arrivals()
    print(f"\n{workload}: {len(arrivals)} requests, {experiment.workers} workers, load {load:g}", flush=True)
    setup, prepared = experiment.setup(), prepare(arrivals)
    for policy in policies:
        summary = compare([policy], setup, prepared, Objective())[0].summary
        print(
            f"{summary.policy:22s} hit {summary.hit_rate:.3f}  TTFT {summary.ttft_s.mean:8.4f} s, "
            f"p99 {summary.ttft_s.p99:6.2f}  {summary.output_tokens_per_s:8.0f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    main()

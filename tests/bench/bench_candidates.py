"""Candidates for the default routing score, in the lab: python tests/bench/bench_candidates.py [WORKERS [LOAD]]."""

from __future__ import annotations

import sys

from deploy.lab.comparison import compare
from deploy.lab.experiment import Experiment
from deploy.lab.simulation import prepare
from loadtest.statistics import Objective
from router.policies import make_policy
from tests.bench.candidate_policies import (
    AffinityGate,
    TwoHashes,
    backlog,
    falling,
    predicted_ttft,
    product,
    relative,
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
    policies = [make_policy(name) for name in ("min_cost", "sglang", "linear", "round_robin")]
    policies += [backlog(0.1), backlog(0.3), backlog(1.0), falling(1.0), product(), predicted_ttft()]
    policies += [AffinityGate(), TwoHashes(), relative(0.2, 1, 8)]
    policies += [weighted(0.2, 1 / 32), weighted(0.2, 1 / 16), weighted(0.2, 1 / 8)]
    for workload in WORKLOADS:
        experiment = Experiment(workload, workers=workers, load=load, kv_tokens=100_000, requests=100 * workers)
        arrivals = experiment.arrivals()
        print(f"\n{workload}: {len(arrivals)} requests, {workers} workers, load {load:g}", flush=True)
        for run in compare(policies, experiment.setup(), prepare(arrivals), Objective()):
            summary = run.summary
            print(
                f"{summary.policy:18s} hit {summary.hit_rate:.3f}  TTFT {summary.ttft_s.mean:7.3f} s, "
                f"p99 {summary.ttft_s.p99:6.2f}  {summary.output_tokens_per_s:8.0f} tokens/s"
            )


if __name__ == "__main__":
    main()

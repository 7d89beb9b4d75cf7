"""What several routers lose against one, in virtual time, and how much of it is chance.

python -m tests.bench.bench_lab_routers [--workload working-set-1.5] [--loads 0.5,0.9] [--seeds 1-14] [--routers 2,4]

For each load and seed the same requests are served by a fleet with one router, again by one with every arrival up to a
millisecond later, which stands for nothing and says how far chance goes, and by several routers. Overcommitted caches
are chaotic: single seeds differ by several per cent either way, so only means with their standard errors say anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from deploy.lab.experiment import Experiment
from deploy.lab.simulation import Prepared, Setup, Simulation, prepare
from loadtest.statistics import Objective, summarize
from router.policies import make_policy
from tests.bench.paired import Rates, table

SHIFT_S = 0.001


def main() -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="working-set-1.5")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--loads", default="0.5,0.9")
    parser.add_argument("--seeds", default="1-14", help="from-to")
    parser.add_argument("--routers", default="2", help="numbers with commas")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    for load in map(float, options.loads.split(",")):
        found: dict[str, list[Rates]] = {}
        for seed in range(int(first), int(last or first) + 1):
            experiment = Experiment(
                workload=options.workload,
                policies="min_cost",
                workers=options.workers,
                kv_tokens=options.kv_tokens,
                requests=options.requests,
                load=load,
                seed=seed,
            )
            for name, rates in _runs(experiment, [int(number) for number in options.routers.split(",")]):
                found.setdefault(name, []).append(rates)
        print(f"{options.workload}, load {load:g}, seeds {options.seeds}\n{table(found)}\n", flush=True)


def _runs(experiment: Experiment, routers: list[int]) -> Iterator[tuple[str, Rates]]:
    workload = prepare(experiment.arrivals())
    setup = Setup(presets=experiment.presets(), seed=experiment.seed)
    yield "one router", _rates(setup, workload)
    yield "one, 1 ms shifted", _rates(setup, _shifted(workload, Random(experiment.seed)))
    for number in routers:
        yield f"{number} routers", _rates(replace(setup, num_routers=number), workload)


def _rates(setup: Setup, workload: Prepared) -> Rates:
    summary = summarize(Simulation(make_policy("min_cost"), setup, workload).run(), Objective())
    return Rates(summary.hit_rate, summary.ttft_s.mean, summary.request_prediction_error, summary.failed)


def _shifted(workload: Prepared, random: Random) -> Prepared:
    """The same requests in the same order, each up to SHIFT_S later."""
    times_s = sorted(arrival.at_s + random.uniform(0, SHIFT_S) for arrival in workload.arrivals)
    arrivals = [replace(arrival, at_s=at_s) for arrival, at_s in zip(workload.arrivals, times_s, strict=True)]
    return Prepared(arrivals, workload.block_hashes, workload.reusable)


if __name__ == "__main__":
    main()

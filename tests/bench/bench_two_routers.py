"""Hit rates with one router and with two in front of the same workers: real processes, real time.

python -m tests.bench.bench_two_routers [--workers 4] [--requests 200] [--seeds 1,2,3,4]
python -m tests.bench.bench_two_routers --workloads working-set-1.5 --lengths 1 --rate 4     # more than caches can hold

The workers pretend to be GPUs. For each seed the same requests go, with empty caches each time and in an order that
turns, to one router, to one again, which says how far chance goes, and to two in turn; each of the two knows of the
other's requests only by what the workers tell. In virtual time: `python -m tests.bench.bench_lab_routers`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from rich.console import Console

from deploy.bench.fleet import Demand, Target, simulated_fleet, survey
from deploy.processes import Child, ChildSpec
from deploy.progress import Progress as Told
from loadtest.callers import GrpcCaller
from loadtest.driver import Driver
from loadtest.results import Outcome
from loadtest.workloads import Arrival, ceiling
from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.retry import RetryPolicy
from tests.bench.paired import Rates, table

KV_TOKENS = 32_768
RUNS = {"one router": 1, "one again": 1, "two routers": 2}
WORKLOADS = ("shared-prefix", "working-set-0.75", "working-set-1.5")


def main() -> None:
    """Print a line a run, and a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second and worker")
    parser.add_argument("--seeds", default="1,2,3,4")
    parser.add_argument("--lengths", type=float, default=0.5, help="of prompts and answers, times the workload's own")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    options = parser.parse_args()
    demands = [
        [
            Demand(workload, options.requests, options.rate * options.workers, lengths=options.lengths, seed=int(seed))
            for seed in options.seeds.split(",")
        ]
        for workload in options.workloads.split(",")
    ]
    asyncio.run(_compare(options.workers, demands))


async def _compare(num_workers: int, demands: Sequence[Sequence[Demand]]) -> None:
    with Told(Console(stderr=True)) as tell:
        async with simulated_fleet("min_cost", num_workers, KV_TOKENS, tell) as fleet:
            tell.pause()
            async with Client(Endpoint(fleet.endpoint)) as client:
                workers = [entry.address for entry in await client.list_workers()]
            second = await _second_router(workers)
            try:
                routers = [fleet.endpoint, await second.address()]
                await _see_all(routers[1], num_workers)
                for of_one_workload in demands:
                    await _compare_on(of_one_workload, routers, workers)
            finally:
                await second.stop(30.0)


async def _compare_on(demands: Sequence[Demand], routers: Sequence[str], workers: Sequence[str]) -> None:
    found: dict[str, list[Rates]] = {name: [] for name in RUNS}
    for turn, demand in enumerate(demands):
        target = await survey(Endpoint(routers[0]), "")
        arrivals = demand.arrivals(target)
        for name in [*RUNS][turn % len(RUNS) :] + [*RUNS][: turn % len(RUNS)]:
            await _empty(workers)
            run = await _drive(routers[: RUNS[name]], target, arrivals)
            found[name].append(run)
            print(
                f"{demand.workload}, seed {demand.seed}, {name}: hit rate {run.hit_rate:.3f} of "
                f"{ceiling(arrivals):.3f}, mean TTFT {run.ttft_s:.3f} s, {run.failed} of {len(arrivals)} failed",
                flush=True,
            )
    print(f"{demands[0].workload}, {len(demands)} seeds\n{table(found)}\n", flush=True)


async def _drive(routers: Sequence[str], target: Target, arrivals: Sequence[Arrival]) -> Rates:
    """The requests in turn over the routers, each at its own time."""
    outcomes: list[Outcome] = []

    async def drive(address: str, share: Sequence[Arrival]) -> None:
        async with Client(Endpoint(address), retry=RetryPolicy(retries=0)) as client:
            driven = await Driver(GrpcCaller(client, timeout_s=300.0), target.workers).drive(address, share)
            outcomes.extend(driven.result.outcomes)

    async with asyncio.TaskGroup() as group:
        for place, address in enumerate(routers):
            group.create_task(drive(address, arrivals[place :: len(routers)]))
    begun = [each for each in outcomes if each.first_token_s is not None]
    cached = sum(each.cached_tokens for each in begun)
    missed = sum(abs(each.predicted_tokens - each.cached_tokens) for each in begun)
    return Rates(
        hit_rate=cached / max(1, sum(each.prompt_tokens for each in begun)),
        ttft_s=mean((each.first_token_s or 0.0) - each.arrived_s for each in begun),
        mispredicted=missed / max(1, cached),
        failed=sum(not each.is_complete for each in outcomes),
    )


async def _second_router(workers: Sequence[str]) -> Child:
    ports = ("--port", "0", "--metrics-port", "0", "--http-port", "-1")
    arguments = ("router", *ports, "--log-level", "warning", "--workers", ",".join(workers))
    folder = Path(tempfile.mkdtemp(prefix="radixfleet-bench-"))
    return await Child.start(ChildSpec("router-2", arguments, {}), folder)


async def _see_all(router: str, num_workers: int) -> None:
    async with Client(Endpoint(router)) as client:
        while True:
            if sum(not entry.ineligible_reason for entry in await client.list_workers()) >= num_workers:
                return
            await asyncio.sleep(0.2)


async def _empty(workers: Sequence[str]) -> None:
    for address in workers:
        async with Client(Endpoint(address)) as client:
            await client.flush_cache()


if __name__ == "__main__":
    main()

"""Hit rates with one router and with two in front of the same workers: real processes, real time.

python tests/bench/bench_two_routers.py [--workers 4] [--requests 200] [--seeds 1,2]
python tests/bench/bench_two_routers.py --workloads working-set-1.5 --lengths 1 --rate 4     # more than caches can hold

The workers pretend to be GPUs. For each seed the same requests go to one router, and then, with empty caches, to two in
turn; each of the two knows of the other's requests only by what the workers tell. The lab does the same in virtual
time: `radixfleet lab --routers 1,2`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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

KV_TOKENS = 32_768
WORKLOADS = ("shared-prefix", "working-set-0.75", "working-set-1.5")


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one run."""

    hit_rate: float
    ttft_s: float
    failed: int


def main() -> None:
    """Print a line a run, and the ratio of the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second and worker")
    parser.add_argument("--seeds", default="1,2")
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
    rates: dict[int, list[float]] = {1: [], 2: []}
    for demand in demands:
        target = await survey(Endpoint(routers[0]), "")
        arrivals = demand.arrivals(target)
        for count, found in rates.items():
            await _empty(workers)
            run = await _drive(routers[:count], target, arrivals)
            found.append(run.hit_rate)
            print(
                f"{demand.workload}, seed {demand.seed}, {count} router(s): hit rate {run.hit_rate:.3f} of "
                f"{ceiling(arrivals):.3f}, mean TTFT {run.ttft_s:.3f} s, {run.failed} of {len(arrivals)} failed",
                flush=True,
            )
    one, two = mean(rates[1]), mean(rates[2])
    print(
        f"{demands[0].workload}: two routers hit {two:.3f}, one {one:.3f}: {100 * (two / one - 1):+.1f} %", flush=True
    )


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
    return Rates(
        hit_rate=sum(each.cached_tokens for each in begun) / max(1, sum(each.prompt_tokens for each in begun)),
        ttft_s=mean((each.first_token_s or 0.0) - each.arrived_s for each in begun),
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

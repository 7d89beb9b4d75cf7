"""Candidates for the default routing score on every workload, fleet and load, in virtual time.

python tests/bench/bench_candidates.py --cells FOLDER [--trace mooncake_conversation_trace.jsonl]
python tests/bench/bench_candidates.py --cells FOLDER --workers 4 --loads 0.8 --workloads hot-prefix --policies all

Each cell of the grid is one simulation; its result is kept in FOLDER, so the command may be stopped, widened and
repeated. In the end, a row for each workload, fleet and load: mean TTFT and output tokens a second (until the last
request came) of the default, of SGLang's rule and of round robin over those of the best policy there (medians over the
seeds), and which that is. The best of many is the luckiest too, so with one seed or two a row says little: from three
seeds on, the default is also set against the best but itself seed by seed, with the standard error of the mean ratio.
`--seeds 301-312` are twelve.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

from deploy.lab.repetition import paired
from loadtest.catalog import CATALOG
from router.policies import Policy, make_policy
from tests.bench.candidate_grid import PUBLISHED, Cell, Cells, Spot, Standing, ratios, standings
from tests.bench.candidate_policies import CANDIDATES, Dealt

DEFAULT = "min_cost"
SHOWN = (DEFAULT, "sglang", "round_robin")
BASELINES = (DEFAULT, "sglang", "linear", "round_robin")
REQUESTS = {2: 120, 4: 160, 16: 320}
REQUESTS_PER_WORKER = 15
"""On fleets that `REQUESTS` has not."""
LOADS = {2: (0.6, 0.9, 1.1), 4: (0.6, 0.9, 1.1)}
LOAD = 0.9
"""On larger fleets, whose cells take long."""
SEEDS_FOR_ERROR = 3
TRACE_FACTOR = 2
"""A trace needs a longer stretch until its requests find what they share."""


def main() -> None:
    """Run what is lacking, then print the tables."""
    options = _options()
    policies = _policies(options.policies)
    spots = list(dict.fromkeys(_spots(options)))
    cells = Cells(options.cells)
    _run(cells, spots, policies, options.minutes)
    found = standings(cells.of([policy.name for policy in policies], spots))
    _print_ratios(found)
    if options.detail:
        _print_detail(found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, required=True, help="folder for the results of cells")
    parser.add_argument("--workers", default="2,4,16,64")
    parser.add_argument(
        "--loads", help="shares of what the fleet could take; default: 0.6,0.9,1.1, and 0.9 on more than 4 workers"
    )
    parser.add_argument("--seeds", default="101,102,103", help="numbers with commas, or from-to")
    parser.add_argument("--workloads", default=",".join(CATALOG))
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's form, as one more workload")
    parser.add_argument(
        "--policies", default=",".join((*BASELINES, "ttft", "affinity")), help="names with commas, or all"
    )
    parser.add_argument("--requests", type=float, default=1.0, help="times as many requests in each cell")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then, and print what there is")
    parser.add_argument("--detail", action="store_true", help="also print every policy's figures")
    return parser.parse_args()


def _policies(names: str) -> list[Policy]:
    if names == "all":
        return [make_policy(name) for name in BASELINES] + list(CANDIDATES.values())
    unknown = [name for name in names.split(",") if name not in CANDIDATES and name not in BASELINES]
    if unknown:
        sys.exit(f"no policy is called {unknown[0]!r}; there are {', '.join((*BASELINES, *CANDIDATES))}, and all")
    return [CANDIDATES[name] if name in CANDIDATES else make_policy(name) for name in names.split(",")]


def _spots(options: argparse.Namespace) -> Iterator[Spot]:
    """Small fleets first, then seed by seed, so that a run cut short has something of everything."""
    workloads = options.workloads.split(",") if options.workloads else []
    for workers in map(int, options.workers.split(",")):
        requests = round(options.requests * REQUESTS.get(workers, REQUESTS_PER_WORKER * workers))
        loads = map(float, options.loads.split(",")) if options.loads else LOADS.get(workers, (LOAD,))
        for seed, load in product(_numbers(options.seeds), loads):
            yield from (_spot(name, workers, load, seed, requests) for name in workloads)
            if options.trace:
                yield Spot(str(options.trace), workers, load, seed, TRACE_FACTOR * requests)


def _numbers(text: str) -> list[int]:
    """`3,5-7` is 3, 5, 6, 7."""
    ends = [part.split("-") for part in text.split(",")]
    return [number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]


def _spot(workload: str, workers: int, load: float, seed: int, requests: int) -> Spot:
    """The published experiment is the same for all fleets and loads."""
    if workload == PUBLISHED:
        return Spot(workload, 8, 0.0, seed, 1024)
    return Spot(workload, workers, load, seed, requests)


def _run(cells: Cells, spots: Sequence[Spot], policies: Sequence[Policy], minutes: float) -> None:
    """Progress on stderr."""
    total = sum(len(cells.lacking(spot, policies)) for spot in spots)
    ended, started_s = 0, time.monotonic()

    def show(cell: Cell) -> None:
        nonlocal ended
        ended += 1
        spot, passed = cell.spot, time.monotonic() - started_s
        print(
            f"{ended}/{total} after {passed:.0f} s: {Path(spot.workload).name}, {spot.workers} workers, load "
            f"{spot.load:g}, seed {spot.seed}, {cell.policy}: TTFT {cell.ttft_s:.3f} s",
            file=sys.stderr,
            flush=True,
        )

    for spot in spots:
        if time.monotonic() - started_s > 60 * minutes:
            print("stopped at --minutes; the same command goes on from here", file=sys.stderr)
            return
        cells.run(spot, policies, show)


def _print_ratios(found: dict[tuple[str, int, float], dict[str, Standing]]) -> None:
    print("over the best policy of each row: mean TTFT / steady output tokens a second; medians over the seeds")
    print(f"{'workload':18s} {'workers':>7s} {'load':>4s} {'seeds':>5s}", *(f"{n:>13s}" for n in SHOWN), "  best TTFT")
    for (workload, workers, load), standing in found.items():
        shown = [_pair(standing, name) for name in SHOWN]
        best = min(standing, key=lambda name: ratios(standing, name)[0])
        seeds = next(iter(standing.values())).seeds
        against = _against_best_other(standing) if seeds >= SEEDS_FOR_ERROR else ""
        print(f"{Path(workload).name[:18]:18s} {workers:7d} {load:4g} {seeds:5d}", *shown, f"  {best}{against}")
    for name in sorted({name for standing in found.values() for name in standing}):
        pairs = [ratios(standing, name) for standing in found.values() if name in standing]
        late, slow = sorted(ttft for ttft, _ in pairs), sorted(tokens for _, tokens in pairs)
        print(
            f"{name:24s} TTFT over the best: median {late[len(late) // 2]:.2f}, worst {late[-1]:.2f}; within 5 % in "
            f"{sum(ttft <= 1.05 for ttft in late)} of {len(late)} rows; tokens/s: worst {slow[0]:.2f}"
        )


def _against_best_other(standing: dict[str, Standing]) -> str:
    others = [name for name in standing if name not in (DEFAULT, Dealt.name)]
    if DEFAULT not in standing or not others:
        return ""
    best = min(others, key=lambda name: fmean(standing[name].ttft_s_by_seed.values()))
    ours, theirs = standing[DEFAULT].ttft_s_by_seed, standing[best].ttft_s_by_seed
    mean, error = paired([ours[seed] for seed in ours], [theirs[seed] for seed in ours])
    return f"; {DEFAULT} over {best}, paired: {mean:.3f} ± {error:.3f}"


def _pair(standing: dict[str, Standing], name: str) -> str:
    if name not in standing:
        return f"{'-':>13s}"
    late, tokens = ratios(standing, name)
    return f"{late:7.2f} /{tokens:5.2f}"


def _print_detail(found: dict[tuple[str, int, float], dict[str, Standing]]) -> None:
    for (workload, workers, load), standing in found.items():
        print(f"\n{Path(workload).name}, {workers} workers, load {load:g}")
        for name, each in sorted(standing.items(), key=lambda item: item[1].ttft_s):
            times = f"TTFT {each.ttft_s:8.4f} s  answered {each.latency_s:8.4f} s"
            print(f"{name:24s} hit {each.hit_rate:.3f}  {times}  {each.steady_output_tokens_per_s:8.0f} tokens/s")


if __name__ == "__main__":
    main()

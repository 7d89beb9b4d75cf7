"""Cells of a grid of workloads, fleets, loads, seeds and routing policies: run once each, kept in a file.

A cell is one policy on one workload, in virtual time. Its result is a line of `cells.jsonl` in a folder that the user
names, and a cell that stands there is not run again, so a grid may be stopped and gone on with. A cell is known by its
coordinates and its policy's name alone: take another folder after a change of a policy, the lab or the scheduler.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from deploy.lab.capacity import requests_per_s
from deploy.lab.comparison import Variant, compare
from deploy.lab.experiment import VOCAB_SIZE, Experiment
from deploy.lab.simulation import Prepared, Setup, prepare
from loadtest.statistics import Objective
from loadtest.trace import Trace
from loadtest.workloads import Arrival
from router.policies import Policy
from tests.bench.candidate_policies import Dealt

KV_TOKENS = 100_000
"""Of a worker on generated workloads, so that working sets of the fleet's size stay small. A trace gets the preset's
own pool."""
KV_TOKENS_OF_MANY = 50_000
"""The same on fleets of more than `FEW` workers."""
FEW = 4
PUBLISHED = "published"
"""All at once, on the fleet that the experiment was made on: workers and load do not count."""


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """A workload on a fleet: what all policies of a comparison have in common."""

    workload: str
    """A name of the lab's catalog, or a trace's path."""
    workers: int
    load: float
    seed: int
    """Of a trace: which stretch of it."""
    requests: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy's figures on a spot."""

    spot: Spot
    policy: str
    ttft_s: float
    """Mean."""
    ttft_p99_s: float
    latency_s: float
    """Mean, until the answer's end."""
    steady_output_tokens_per_s: float
    """Until the last request came: which answer ends last does not decide it."""
    hit_rate: float
    ceiling: float
    speed: float = 0.0
    """Of a trace: how many times as fast as it was recorded."""


class Cells:
    """The cells that have been run, in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "cells.jsonl"
        self._cells: dict[tuple[Spot, str], Cell] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ():
            fields = json.loads(line)
            cell = Cell(Spot(**fields.pop("spot")), **fields)
            self._cells[cell.spot, cell.policy] = cell

    def __len__(self) -> int:
        return len(self._cells)

    def lacking(self, spot: Spot, policies: Iterable[Policy]) -> list[Policy]:
        """Those that have not been run there."""
        return [policy for policy in policies if (spot, policy.name) not in self._cells]

    def run(self, spot: Spot, policies: Sequence[Policy], on_cell: Callable[[Cell], None]) -> None:
        """Run what is lacking. `on_cell` hears of each new cell."""
        policies = self.lacking(spot, policies)
        if not policies:
            return
        workload, experiment, speed = _staged(spot)
        for policy in policies:
            setup = Setup(experiment.presets(), seed=spot.seed)
            summary = compare([Variant(policy.name, policy, setup)], workload, Objective())[0].summary
            cell = Cell(
                spot,
                policy.name,
                summary.ttft_s.mean,
                summary.ttft_s.p99,
                summary.latency_s.mean,
                summary.steady_output_tokens_per_s,
                summary.hit_rate,
                summary.ceiling,
                speed,
            )
            self._cells[spot, policy.name] = cell
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cell)) + "\n")
            on_cell(cell)

    def of(self, policies: Iterable[str], spots: Iterable[Spot]) -> list[Cell]:
        """Those of these policies and spots that have been run."""
        names = set(policies)
        wanted = set(spots)
        return [cell for (spot, name), cell in sorted(self._cells.items()) if name in names and spot in wanted]


@dataclass(frozen=True, slots=True)
class Standing:
    """A policy's figures on a workload, fleet and load: medians over the seeds."""

    ttft_s: float
    latency_s: float
    steady_output_tokens_per_s: float
    hit_rate: float
    ttft_s_by_seed: Mapping[int, float]

    @property
    def seeds(self) -> int:
        """How many."""
        return len(self.ttft_s_by_seed)


def standings(cells: Iterable[Cell]) -> dict[tuple[str, int, float], dict[str, Standing]]:
    """By workload, workers and load: the policies. Only seeds that all of a comparison's policies have count."""
    by_place: dict[tuple[str, int, float], dict[str, dict[int, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        by_place[cell.spot.workload, cell.spot.workers, cell.spot.load][cell.policy][cell.spot.seed] = cell
    found = {}
    for place, by_policy in sorted(by_place.items()):
        common = set.intersection(*(set(by_seed) for by_seed in by_policy.values()))
        if common:
            found[place] = {name: _standing([by_seed[s] for s in common]) for name, by_seed in by_policy.items()}
    return found


def _standing(cells: Sequence[Cell]) -> Standing:
    return Standing(
        median(cell.ttft_s for cell in cells),
        median(cell.latency_s for cell in cells),
        median(cell.steady_output_tokens_per_s for cell in cells),
        median(cell.hit_rate for cell in cells),
        {cell.spot.seed: cell.ttft_s for cell in cells},
    )


def ratios(standing: Mapping[str, Standing], name: str) -> tuple[float, float]:
    """Mean TTFT and steady tokens a second of `name` over those of the best policy in each: 1 is the best itself."""
    rated = [each for policy, each in standing.items() if policy != Dealt.name]
    best_ttft_s = min(each.ttft_s for each in rated)
    most_tokens = max(each.steady_output_tokens_per_s for each in rated)
    ours = standing[name]
    return ours.ttft_s / best_ttft_s, ours.steady_output_tokens_per_s / most_tokens


def _staged(spot: Spot) -> tuple[Prepared, Experiment, float]:
    if Path(spot.workload).is_file():
        return _stretch_of_trace(spot)
    experiment = Experiment(
        spot.workload,
        workers=spot.workers,
        load=spot.load,
        kv_tokens=KV_TOKENS if spot.workers <= FEW else KV_TOKENS_OF_MANY,
        requests=spot.requests,
        seed=spot.seed,
    )
    if spot.workload == PUBLISHED:
        experiment = Experiment(PUBLISHED, workers=8, gpus="a100-8b", seed=spot.seed)
    return prepare(experiment.arrivals()), experiment, 0.0


def _stretch_of_trace(spot: Spot) -> tuple[Prepared, Experiment, float]:
    """`spot.requests` requests from where the seed says, as fast as gives the fleet this load."""
    experiment = Experiment(spot.workload, workers=spot.workers, seed=spot.seed)
    whole = _trace(Path(spot.workload))
    start = spot.seed * 2039 % max(1, len(whole) - spot.requests)
    stretch = whole[start : start + spot.requests]
    recorded_s = stretch[-1].at_s - stretch[0].at_s
    rate = spot.load * requests_per_s(experiment.presets(), stretch)
    speed = rate * recorded_s / len(stretch)
    arrivals = [replace(arrival, at_s=(arrival.at_s - stretch[0].at_s) / speed) for arrival in stretch]
    return prepare(arrivals), experiment, speed


@cache
def _trace(path: Path) -> list[Arrival]:
    return Trace(path).arrivals(vocab_size=VOCAB_SIZE, seed=0)

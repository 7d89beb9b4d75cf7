"""Small simulated fleets, and how to run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from deploy.lab.presets import PRESETS, Preset
from deploy.lab.simulation import Setup, Simulation, prepare
from loadtest.results import RunResult
from loadtest.statistics import Objective, Summary, summarize
from loadtest.workloads import Arrival, SharedPrefix, Workload
from router.policies import make_policy
from worker.runner.sim import CostModel

H100 = PRESETS["h100-8b"]


def fleet(workers: int = 4, *, kv_tokens: int | None = None, places: int | None = None) -> list[Preset]:
    """So many H100 with a pool of that size, and so many places in the batch."""
    preset = H100 if kv_tokens is None else H100.with_kv_tokens(kv_tokens)
    if places is not None:
        capacity = replace(preset.ready.capacity, max_running_requests=places)
        preset = replace(preset, ready=structs.replace(preset.ready, capacity=capacity))
    return [preset] * workers


def slowed(preset: Preset, factor: float) -> Preset:
    """The same with steps that take `factor` times as long."""
    cost = CostModel(**{name: seconds * factor for name, seconds in structs.asdict(preset.cost).items()})
    return replace(preset, name=f"{preset.name}/{factor:g}", cost=cost)


def arrivals_of(workload: Workload, seed: int = 0) -> list[Arrival]:
    """Its requests, with a vocabulary like a model's."""
    return workload.arrivals(vocab_size=32_000, seed=seed)


def shared(
    *, groups: int = 8, per_group: int = 10, prefix: int = 1024, own: int = 64, new: int = 32, rate: float | None = 20.0
) -> list[Arrival]:
    """Requests with shared prefixes."""
    return arrivals_of(
        SharedPrefix(
            num_groups=groups,
            prompts_per_group=per_group,
            prefix_tokens=prefix,
            unique_tokens=own,
            max_new_tokens=new,
            requests_per_s=rate,
        )
    )


def run(
    arrivals: Sequence[Arrival], presets: Sequence[Preset] | None = None, policy: str = "min_cost", **setup: Any
) -> RunResult:
    """One run."""
    return Simulation(make_policy(policy), Setup(presets or fleet(), **setup), prepare(arrivals)).run()


def figures(result: RunResult) -> Summary:
    """Its figures."""
    return summarize(result, Objective())


def requests_by_worker(result: RunResult, *, since_s: float = 0.0, until_s: float = float("inf")) -> list[int]:
    """How many requests of that time each worker got."""
    counts = [0] * result.num_workers
    for outcome in result.outcomes:
        if since_s <= outcome.arrived_s < until_s and outcome.worker >= 0:
            counts[outcome.worker] += 1
    return counts

"""Policies side by side on one workload, under one or several ways of knowing the fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deploy.lab.simulation import Prepared, Setup, Simulation
from loadtest.results import RunResult
from loadtest.statistics import Objective, Summary, summarize
from router.policies import Policy


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a comparison: a policy and the setup that it runs in."""

    name: str
    """Unique among the variants of a comparison."""
    policy: Policy
    setup: Setup


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One variant's result, and its figures. Both call the policy by the variant's name."""

    result: RunResult
    summary: Summary


def compare(
    variants: Sequence[Variant],
    workload: Prepared,
    objective: Objective,
    on_progress: Callable[[str, int], None] = lambda name, ended: None,
) -> list[Run]:
    """Run the workload under each variant. `on_progress` is told its name and how many requests have ended."""
    runs = []
    for variant in variants:
        simulation = Simulation(variant.policy, variant.setup, workload)
        result = replace(simulation.run(partial(on_progress, variant.name)), policy=variant.name)
        runs.append(Run(result, summarize(result, objective)))
    return runs

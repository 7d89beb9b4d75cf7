"""Policies side by side on one workload and one fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deploy.lab.simulation import Prepared, Setup, Simulation
from loadtest.results import RunResult
from loadtest.statistics import Objective, Summary, summarize
from router.policies import Policy


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One policy's result, and its figures."""

    result: RunResult
    summary: Summary


def compare(
    policies: Sequence[Policy],
    setup: Setup,
    workload: Prepared,
    objective: Objective,
    on_progress: Callable[[str, int], None] = lambda policy, ended: None,
) -> list[Run]:
    """Run the workload under each policy. `on_progress` is told the policy and how many requests have ended."""
    runs = []
    for policy in policies:
        result = Simulation(policy, setup, workload).run(partial(on_progress, policy.name))
        runs.append(Run(result, summarize(result, objective)))
    return runs

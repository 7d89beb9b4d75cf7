"""What came of loads on fleets: for people, as a page, and for scripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from deploy.bench.fleet import Demand, Target
from deploy.consoles import new_console
from deploy.lab.tables import ratios_table, results_tables
from deploy.tables import print_facts, print_whole
from loadtest.catalog import CATALOG, number_told
from loadtest.driver import Driven
from loadtest.report import html_report
from loadtest.statistics import Summary
from loadtest.svg import number
from loadtest.workloads import Arrival, ceiling

_BUSY, _LATE_S = 0.8, 0.1
"""Beyond these figures are doubtful."""


@dataclasses.dataclass(frozen=True, slots=True)
class RouterCost:
    """What the router itself took; known of one that we started."""

    cpu_s: float
    """For a request."""
    memory_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One fleet under the load."""

    target: Target
    arrivals: Sequence[Arrival]
    driven: Driven
    router: RouterCost | None = None
    tells_cached: bool = True
    """Otherwise hit rates are not known."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped before all requests had ended."""
        return len(self.driven.result.outcomes) < len(self.arrivals)


def facts(demand: Demand, run: Run) -> dict[str, str]:
    """What was asked, and of what."""
    entry, arrivals = CATALOG.get(demand.workload), run.arrivals
    prompts = sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals)
    answers = sum(arrival.max_new_tokens for arrival in arrivals) / len(arrivals)
    told = number_told(len(arrivals), demand.requests) if entry else str(len(arrivals))
    scaled = f", lengths x {demand.lengths:g}" if demand.lengths != 1 else ""
    asked, sent = asked_and_sent_rate(demand, run)
    rate = f"sent at {number(sent)} a second" if sent is not None else "sent all at once"
    if asked is not None:
        rate += f" (asked for: {number(asked)}, at random moments)"
    return {
        "workload": (f"{demand.workload}: {entry.text}" if entry else demand.workload) + scaled,
        "requests": f"{told}, {rate}; seed {demand.seed}",
        "tokens": f"prompts {prompts:,.0f}, answers {answers:,.0f} on average",
        "ceiling": f"{ceiling(arrivals):.3f} of the prompt tokens came before",
        "fleet": f"{len(run.target.workers)} workers, {run.target.kv_tokens:,} tokens of KV",
    }


def asked_and_sent_rate(demand: Demand, run: Run) -> tuple[float | None, float | None]:
    """Requests a second that were asked for (None: a trace's own times), and as they were sent (None: all at once)."""
    until_s = run.arrivals[-1].at_s
    return (demand.asked_rate(run.target), len(run.arrivals) / until_s) if until_s else (None, None)


def warnings(runs: Sequence[Run]) -> list[str]:
    """What makes the figures doubtful."""
    found = []
    for run in runs:
        name, driven = run.target.policy, run.driven
        if run.is_stopped:
            found.append(
                f"{name}: stopped after {driven.result.duration_s:,.0f} s; {len(driven.result.outcomes)} of "
                f"{len(run.arrivals)} requests had ended and are counted, and {driven.num_cut} that ran are not"
            )
        if driven.busy_share > _BUSY:
            found.append(
                f"{name}: this process was busy {driven.busy_share:.0%} of the time; latencies are partly its own"
            )
        if driven.late_s > _LATE_S:
            found.append(f"{name}: 1 % of the requests were sent {1000 * driven.late_s:.0f} ms late or more")
        if not run.tells_cached:
            found.append(f"{name} told of no cached tokens (usage.prompt_tokens_details): its hit rate is not known")
        errors = sorted({outcome.error for outcome in driven.result.outcomes if outcome.error})
        found += [f"{name}: {error}" for error in errors[:3]]
    return found


def show(demand: Demand, runs: Sequence[Run], summaries: Sequence[Summary]) -> None:
    """As tables, on stdout."""
    console = new_console()
    print_facts(console, facts(demand, runs[0]))
    for table in (*results_tables(summaries), *ratios_table(summaries)):
        console.print()
        print_whole(console, table)
    for run in runs:
        if run.router is not None:
            cpu_us, megabytes = 1e6 * run.router.cpu_s, run.router.memory_bytes / 1e6
            console.print(f"{run.target.policy}: the router took {cpu_us:,.0f} us of CPU a request, {megabytes:.0f} MB")
    for line in warnings(runs):
        console.print(line, style="yellow", soft_wrap=True)


def write_report(path: Path, demand: Demand, runs: Sequence[Run], summaries: Sequence[Summary]) -> None:
    """As a page. Raises ClickException."""
    page = html_report("Radixfleet load test", facts(demand, runs[0]), [run.driven.result for run in runs], summaries)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write the report: {error}") from error


def as_object(demand: Demand, runs: Sequence[Run], summaries: Sequence[Summary]) -> dict[str, Any]:
    """For scripts. `rates`, requests a second: asked for (None: a trace's own times), sent (None: all at once), and
    answered to the end; `requests_per_s` is the last of them."""
    return {
        "demand": dataclasses.asdict(demand),
        "facts": facts(demand, runs[0]),
        "warnings": warnings(runs),
        "runs": [
            dataclasses.asdict(summary)
            | {
                "rates": _rates(demand, run, summary),
                "max_to_mean_work": summary.max_to_mean_work,
                "sent_late_s_p99": run.driven.late_s,
                "client_busy_share": run.driven.busy_share,
                "router": run.router and dataclasses.asdict(run.router),
            }
            for run, summary in zip(runs, summaries, strict=True)
        ],
    }


def _rates(demand: Demand, run: Run, summary: Summary) -> dict[str, float | None]:
    asked, sent = asked_and_sent_rate(demand, run)
    return {"asked_per_s": asked, "sent_per_s": sent, "answered_per_s": summary.requests_per_s}

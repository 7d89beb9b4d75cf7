"""`radixfleet lab`: a workload on a simulated fleet, under one routing policy or several."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.consoles import new_console
from deploy.lab.comparison import Run, compare
from deploy.lab.experiment import DEFAULT_LOAD, DEFAULT_REQUESTS, Experiment, ExperimentError
from deploy.lab.presets import PRESETS
from deploy.lab.repetition import standings
from deploy.lab.simulation import prepare
from deploy.lab.tables import results_tables, seeds_table
from deploy.numbers import Number
from deploy.options import Several, id_tokens_option, json_option, objective_options, report_option
from deploy.outcomes import require_answers
from deploy.tables import print_facts, print_whole
from loadtest.catalog import CATALOG
from loadtest.report import html_report
from loadtest.statistics import Objective, Summary
from loadtest.trace import TraceError
from loadtest.workloads import Arrival
from router.policies import POLICY_NAMES

_MOST_ERRORS = 3
_NAMES = "\b\nWorkloads:\n" + "\n".join(f"  {name:17s} {entry.text}" for name, entry in CATALOG.items())


@click.command(epilog=f"{_NAMES}\n\nPolicies: {', '.join(POLICY_NAMES)}. GPUs: {', '.join(PRESETS)}.")
@click.option(
    "--workload", default="shared-prefix", show_default=True, metavar="NAME|FILE", help="A name below, or a trace."
)
@click.option("--policy", "policies", default="all", show_default=True, metavar="NAME,...", help="Which to compare.")
@click.option("--workers", type=click.IntRange(1, 1000), default=8, show_default=True, help="How many.")
@click.option("--gpu", "gpus", default="h100-8b", show_default=True, metavar="NAME,...", help="Several take turns.")
@click.option("--kv-tokens", type=click.IntRange(min=1), help="Size of each KV pool; default: by the GPU's memory.")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    help=f"About so many; default: {DEFAULT_REQUESTS}, and all of a trace.",
)
@click.option("--rate", type=Number(0, min_open=True), help="Requests a second; default: by --load.")
@click.option(
    "--load",
    type=Number(0, min_open=True),
    help="Rate as a share of what the fleet could take with perfect caching; "
    f"default: {DEFAULT_LOAD}, and a trace as it was recorded.",
)
@click.option(
    "--speed", type=Number(0, min_open=True), help="Replay a trace so many times as fast; or give --load or --rate."
)
@id_tokens_option
@click.option(
    "--routers",
    type=Several(click.IntRange(1, 64)),
    default="1",
    show_default=True,
    metavar="NUMBER,...",
    help="Routers that share the requests; several numbers are compared.",
)
@click.option(
    "--truth",
    "truths",
    type=Several(click.Choice(["deltas", "receipts"])),
    default="deltas",
    show_default=True,
    metavar="deltas|receipts,...",
    help="What routers learn of caches: every change, or only what each request found; both are compared.",
)
@click.option(
    "--report-delay",
    "report_delay_s",
    type=Number(0),
    default=0.1,
    show_default=True,
    help="Seconds by which a worker's reports are late.",
)
@objective_options
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed gives the same result."
)
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Draw the workload so many times, from --seed on, and say how sure differences are. A trace stays the same, "
    "and --report is of the first.",
)
@report_option
@json_option
def lab(*, as_json: bool, report: Path | None, slo_ttft: float, slo_itl: float, num_seeds: int, **options: Any) -> None:
    """Compare routing policies on a simulated fleet, in virtual time, without a GPU.

    Router and workers are the real ones: sketch, policies and books; scheduler, radix cache and page accounting. A
    model of what each step costs stands in for the GPU. A workload is one of those below, or a file of real requests.

    \b
    radixfleet lab
    radixfleet lab --workload zipf --workers 16 --policy min_cost,sglang,round_robin --report zipf.html
    radixfleet lab --workload traffic.jsonl --load 0.8 --workers 32 --report traffic.html
    radixfleet lab --workload traffic.jsonl --speed 4 --gpu h100-8b,a100-8b --json
    radixfleet lab --workload working-set-1.5 --policy min_cost --truth deltas,receipts --routers 1,2
    radixfleet lab --workload bursts --workers 4 --requests 200 --policy min_cost,sglang,linear --seeds 8

    A file has a JSON object a line: timestamp (ms), input_length, output_length, and hash_ids, one for each 512 tokens
    of the prompt; equal ids mean equal prompts up to there. This is the form of the traces that Mooncake published.
    """
    experiment, objective = Experiment(**options), Objective(slo_ttft, slo_itl)
    arrivals, runs = _run(experiment, objective)
    summaries, errors = [[run.summary for run in runs]], _errors(runs)
    for more in range(1, num_seeds):
        again = _run(dataclasses.replace(experiment, seed=experiment.seed + more), objective)[1]
        summaries.append([run.summary for run in again])
        errors |= _errors(again)
    facts = experiment.facts(arrivals)
    if as_json:
        click.echo(json.dumps(_as_object(experiment, arrivals, facts, summaries)))
    else:
        _print(facts, summaries)
        _print_errors(errors)
    if report is not None:  # last: figures are not lost with a page that cannot be written
        _write_report(report, facts, runs)
    require_answers(
        [summary for of_seed in summaries for summary in of_seed], [error for _, error in errors if as_json]
    )


def _run(experiment: Experiment, objective: Objective) -> tuple[list[Arrival], list[Run]]:
    """The requests, and what became of them. Raises UsageError."""
    try:
        variants, arrivals = experiment.variants(), experiment.arrivals()
    except (ExperimentError, TraceError) as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.UsageError(f"cannot read the trace: {error}") from error
    with _progress() as progress:
        preparing = progress.add_task(f"seed {experiment.seed}: hashing prompts", total=len(arrivals))
        workload = prepare(arrivals, lambda done: progress.update(preparing, completed=done))
        progress.remove_task(preparing)
        tasks = {each.name: progress.add_task(each.name, total=len(arrivals), start=False) for each in variants}

        def show(name: str, ended: int) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], completed=ended)

        return arrivals, compare(variants, workload, objective, show)


def _progress() -> Progress:
    """On stderr; only a terminal sees it move."""
    return Progress(
        TextColumn("{task.description:16s}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=new_console(stderr=True),
        transient=True,
    )


def _errors(runs: Sequence[Run]) -> set[tuple[str, str]]:
    """What went wrong, by policy."""
    return {(run.summary.policy, outcome.error) for run in runs for outcome in run.result.outcomes if outcome.error}


def _print(facts: dict[str, str], by_seed: Sequence[Sequence[Summary]]) -> None:
    console = new_console()
    print_facts(console, facts)
    tables = [*results_tables(by_seed[0])]
    if len(by_seed) > 1:
        tables.append(seeds_table(standings(by_seed), len(by_seed)))
    for table in tables:
        console.print()
        print_whole(console, table)


def _print_errors(errors: Collection[tuple[str, str]]) -> None:
    """Of each policy the first, which tell enough."""
    console = new_console()
    for policy, of_policy in groupby(sorted(errors), key=itemgetter(0)):
        for _, error in islice(of_policy, _MOST_ERRORS):
            console.print(f"{policy}: {error}", soft_wrap=True)


def _write_report(path: Path, facts: dict[str, str], runs: list[Run]) -> None:
    page = html_report("Radixfleet policy lab", facts, [run.result for run in runs], [run.summary for run in runs])
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write the report: {error}") from error


def _as_object(
    experiment: Experiment, arrivals: list[Arrival], facts: dict[str, str], by_seed: Sequence[Sequence[Summary]]
) -> dict[str, Any]:
    """For scripts. `policies` are those of the first seed; `seeds`, where there are several, has all of them."""
    told = {
        "experiment": dataclasses.asdict(experiment),
        "facts": facts,
        "requests": len(arrivals),
        "policies": [_summary_as_object(summary) for summary in by_seed[0]],
    }
    if len(by_seed) > 1:
        told["seeds"] = [
            {"seed": experiment.seed + number, "policies": [_summary_as_object(each) for each in summaries]}
            for number, summaries in enumerate(by_seed)
        ]
        told["over_seeds"] = [dataclasses.asdict(standing) for standing in standings(by_seed)]
    return told


def _summary_as_object(summary: Summary) -> dict[str, Any]:
    return dataclasses.asdict(summary) | {
        "max_to_mean_work": summary.max_to_mean_work,
        "split": dataclasses.asdict(summary.split),
    }

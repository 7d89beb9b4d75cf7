"""`radixfleet bench fleet`: load on a fleet, in open loop, and what came of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import psutil
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from deploy.bench.fleet import RATE_OF_A_WORKER, Demand, UnfitWorkload, grpc_caller, simulated_fleet, survey
from deploy.bench.fleet_results import RouterCost, Run, as_object, show, warnings, write_report
from deploy.bench.http_fleet import HttpFleet, http_caller, survey_http
from deploy.consoles import new_console
from deploy.endpoints import endpoint_option
from deploy.interruptible import ctrl_c_calls, run_interruptible
from deploy.lab.experiment import ExperimentError, policy_names
from deploy.numbers import Number
from deploy.options import id_tokens_option, json_option, objective_options, report_option
from deploy.outcomes import require_answers
from deploy.progress import Progress as Told
from loadtest.callers import Caller, CallFailed
from loadtest.catalog import CATALOG
from loadtest.driver import Driven, Driver, Progress
from loadtest.statistics import Objective, summarize
from loadtest.trace import TraceError
from loadtest.workloads import Arrival
from radixfleet.counts import counted
from radixfleet.endpoint import Endpoint
from router.policies import POLICY_NAMES

_NAMES = "\b\nWorkloads:\n" + "\n".join(f"  {name:17s} {entry.text}" for name, entry in CATALOG.items())
_KV_TOKENS = 65_536
_VOCAB_SIZE = 30_000
"""Smaller than that of any model people serve."""

Part = TypeVar("Part")


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """Which fleets."""

    simulate: int | None
    policies: str
    http_urls: tuple[str, ...]
    workers: int
    vocab_size: int
    kv_tokens: int
    as_text: bool


@click.command(epilog=f"{_NAMES}\n\nPolicies: {', '.join(POLICY_NAMES)}.")
@click.option(
    "--workload", default="shared-prefix", show_default=True, metavar="NAME|FILE", help="A name below, or a trace."
)
@click.option(
    "--requests", type=click.IntRange(1), default=400, show_default=True, help="About so many; groups are whole."
)
@click.option(
    "--rate",
    type=Number(0, min_open=True),
    help=f"Requests a second; default: {RATE_OF_A_WORKER:g} a worker, and a trace's own.",
)
@click.option("--speed", type=Number(0, min_open=True), default=1.0, help="Replay a trace so many times as fast.")
@id_tokens_option
@click.option(
    "--lengths",
    type=Number(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Make prompts and answers so many times as long; 0.1 suits a model on a laptop.",
)
@click.option("--model", default="", help="Which model; default: the only one served.")
@click.option("--timeout", "timeout_s", type=Number(0, min_open=True), help="Deadline of each request, in s.")
@click.option(
    "--simulate",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Call no fleet: start one with N simulated GPUs for each policy in turn, as real processes in real time.",
)
@click.option("--policy", "policies", default="min_cost,sglang,round_robin", show_default=True, help="With --simulate.")
@click.option(
    "--http",
    "http_urls",
    multiple=True,
    metavar="[NAME=]URL",
    help="Over OpenAI's HTTP, and so any router or engine; several are asked in turn.",
)
@click.option(
    "--as-text",
    is_flag=True,
    help="With --http: send prompts as words, about one for each token, to servers that take no token ids.",
)
@click.option(
    "--workers", type=click.IntRange(1), default=1, show_default=True, help="With --http: how many there are behind it."
)
@click.option(
    "--vocab-size",
    type=click.IntRange(2),
    default=_VOCAB_SIZE,
    show_default=True,
    help="With --http: prompts are of token ids below.",
)
@click.option(
    "--kv-tokens",
    type=click.IntRange(64),
    default=_KV_TOKENS,
    show_default=True,
    help="With --simulate and --http: size of each worker's KV pool.",
)
@objective_options
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed gives the same requests."
)
@report_option
@json_option
@endpoint_option
def fleet(
    endpoint: Endpoint,
    *,
    slo_ttft: float,
    slo_itl: float,
    report: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Load a fleet over gRPC, or over OpenAI's HTTP, and tell hit rate, latencies and throughput.

    Each request is sent at its own time, whatever became of the others, and its times count from then: a fleet that is
    too slow shows it. Prompts are token ids made from a seed, the same for every model; answers go on to their length.
    Ctrl-C ends the load and shows what came of it until then (exit code 130).

    \b
    radixfleet bench fleet --lengths 0.1 --rate 2
    radixfleet bench fleet --endpoint 10.0.0.1:7070 --workload chat --rate 20 --report chat.html
    radixfleet bench fleet --workload traffic.jsonl --speed 2 --json
    radixfleet bench fleet --simulate 4 --policy min_cost,round_robin
    radixfleet bench fleet --http ours=http://10.0.0.1:7072 --http theirs=http://10.0.0.2:30000 --workers 4

    smg takes no token ids over HTTP: ask it, and all beside it, with --as-text.

    Of --http each has prompts of its own (seed, seed + 1, ...), since the workers behind may be the same, with caches
    that are warm from the one before. The key of RADIXFLEET_API_KEY is shown to all of them.
    """
    demand, asked = _part(Demand, given), _part(_Asked, given)
    _refuse_idle_options(asked, demand)
    try:
        runs, is_stopped = _until_stopped(_works(asked, endpoint, demand))
    except (UnfitWorkload, TraceError) as error:
        raise click.UsageError(str(error)) from error
    except CallFailed as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.UsageError(f"cannot read the trace: {error}") from error
    summaries = [summarize(run.driven.result, Objective(slo_ttft, slo_itl)) for run in runs]
    if as_json:
        click.echo(json.dumps(as_object(demand, runs, summaries)))
    else:
        show(demand, runs, summaries)
    if report is not None:  # last: figures are not lost with a page that cannot be written
        write_report(report, demand, runs, summaries)
    if is_stopped:
        raise click.Abort
    require_answers(summaries, [line for line in warnings(runs) if as_json])


def _until_stopped(works: Iterator[Coroutine[Any, Any, Run]]) -> tuple[list[Run], bool]:
    """The runs until Ctrl-C, and whether it came. Raises Abort where no request of any had ended."""
    runs: list[Run] = []
    for work in works:
        run = run_interruptible(work)
        if run.driven.result.outcomes:
            runs.append(run)
        if run.is_stopped:
            if not runs:
                raise click.Abort
            return runs, True
    return runs, False


def _part(kind: type[Part], given: dict[str, Any]) -> Part:
    """The options that are fields of `kind`."""
    return kind(**{field.name: given[field.name] for field in dataclasses.fields(cast(Any, kind))})


def _works(asked: _Asked, endpoint: Endpoint, demand: Demand) -> Iterator[Coroutine[Any, Any, Run]]:
    """The runs, to be made one after the other."""
    if asked.simulate is not None:
        for name in _policies(asked.policies):
            yield _simulated(name, asked.simulate, asked.kv_tokens, demand)
    elif asked.http_urls:
        for place, fleet in enumerate(_http_fleets(asked.http_urls, endpoint)):
            yield _over_http(fleet, place, demand, asked)
    else:
        yield _measured(endpoint, demand)


def _refuse_idle_options(asked: _Asked, demand: Demand) -> None:
    """What is given and would not be heeded is a mistake."""
    simulated, over_http = asked.simulate is not None, bool(asked.http_urls)
    context = click.get_current_context()
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    idle: list[tuple[str, str]] = []
    if simulated:
        idle += [("endpoint", "--simulate starts its own fleets"), ("http_urls", "--simulate starts its own fleets")]
    else:
        idle += [("policies", "it needs --simulate")]
    if over_http:
        idle += [("endpoint", "--http says whom to ask")]
    else:
        idle += [("workers", "it needs --http"), ("vocab_size", "it needs --http"), ("as_text", "it needs --http")]
    if not simulated and not over_http:
        idle += [("kv_tokens", "it needs --simulate or --http")]
    if demand.workload in CATALOG:
        generated = f"it is for traces, and {demand.workload} is generated"
        idle += [("speed", generated), ("id_tokens", generated)]
        if not CATALOG[demand.workload].has_rate:
            idle += [("rate", f"{demand.workload} comes all at once")]
    elif demand.rate is not None:
        idle += [("speed", "--rate says how fast a trace comes")]
    for name, why in idle:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{options[name]} does nothing here: {why}")


def _http_fleets(urls: Sequence[str], endpoint: Endpoint) -> list[HttpFleet]:
    try:
        return [HttpFleet.named(url, endpoint.shown_key() or "") for url in urls]
    except ValueError as error:
        raise click.UsageError(f"--http: {error}") from error


def _policies(text: str) -> list[str]:
    try:
        return policy_names(text)
    except ExperimentError as error:
        raise click.BadParameter(str(error)) from error


async def _measured(endpoint: Endpoint, demand: Demand) -> Run:
    target = await survey(endpoint, demand.model)
    arrivals = demand.arrivals(target)
    async with grpc_caller(endpoint, demand) as caller:
        return Run(target, arrivals, await _driven(caller, target.policy, target.workers, arrivals))


async def _over_http(fleet: HttpFleet, place: int, demand: Demand, asked: _Asked) -> Run:
    target, served = await survey_http(
        fleet,
        demand.model,
        vocab_size=asked.vocab_size,
        kv_tokens=asked.workers * asked.kv_tokens,
        num_workers=asked.workers,
    )
    own = dataclasses.replace(demand, seed=demand.seed + place)
    arrivals = own.arrivals(target)
    async with http_caller(fleet, own, served, as_text=asked.as_text) as caller:
        driven = await _driven(caller, target.policy, (), arrivals)
        return Run(target, arrivals, driven, tells_cached=caller.told_cached)


async def _driven(caller: Caller, name: str, workers: Sequence[str], arrivals: Sequence[Arrival]) -> Driven:
    """Send everything and wait for every end, or for Ctrl-C, which ends what runs."""
    click.echo(f"{name}: {counted(len(arrivals), 'request')} over {arrivals[-1].at_s:,.0f} s", err=True)
    with _progress(name, len(arrivals)) as on_progress:
        driver = Driver(caller, workers, on_progress=on_progress)
        with ctrl_c_calls(driver.stop):
            return await driver.drive(name, arrivals)


async def _simulated(policy: str, num_workers: int, kv_tokens: int, demand: Demand) -> Run:
    with Told(new_console(stderr=True)) as tell:
        async with simulated_fleet(policy, num_workers, kv_tokens, lambda text: tell(f"{policy}: {text}")) as fleet:
            tell.pause()
            router = psutil.Process(fleet.children[0].pid)
            before_s = sum(router.cpu_times()[:2])
            run = await _measured(Endpoint(fleet.endpoint), demand)
            cpu_s = sum(router.cpu_times()[:2]) - before_s
            return dataclasses.replace(run, router=RouterCost(cpu_s / len(run.arrivals), router.memory_info().rss))


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr; only a terminal sees it move, others get a line each tenth of the way."""
    console = new_console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} running, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=total, running=0, failed=0)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.ended, running=progress.sent - progress.ended, failed=progress.failed)
            if not console.is_terminal and progress.ended * 10 // total > (progress.ended - 1) * 10 // total:
                click.echo(f"{name}: {progress.ended} of {total}, {progress.failed} failed", err=True)

        yield show

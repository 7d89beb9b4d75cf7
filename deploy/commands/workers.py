"""`radixfleet workers`: the fleet as its router sees it, and one worker taken out of it, put back, or forgotten."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Never

import click
from click.core import ParameterSource

from deploy.consoles import new_console
from deploy.endpoints import endpoint_option
from deploy.fleet_changes import SETTLED_S, changes, heard
from deploy.numbers import Number
from deploy.options import json_option
from deploy.tables import pools_table, print_whole, workers_table
from radixfleet.answers import DrainOutcome, WorkerEntry
from radixfleet.client import Client
from radixfleet.counts import counted
from radixfleet.endpoint import Endpoint

_FAILED = 1
_QUIET_S = 0.5
_AWAITED_S = 2.0
"""So long nothing is said of a router that has said nothing yet."""
_MISSED_S = 7.0
"""And of one that has: it says something every five seconds."""


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@click.option("--watch", is_flag=True, help="Go on: a line for each worker that comes, goes, or is in another state.")
@json_option
@endpoint_option
@click.pass_context
def workers(context: click.Context, endpoint: Endpoint, *, watch: bool, as_json: bool) -> None:
    """List the workers that a router knows: their state, load, cache and memory pools.

    \b
    radixfleet workers
    radixfleet workers --json | jq '.workers[].load'
    radixfleet workers --watch                   # what happens to them from now on; `radixfleet top` shows their load
    radixfleet workers --watch --json            # the whole list, a line whenever something in it is different

    One of them can be emptied, for maintenance, and put back to work, or forgotten. A fleet with an admin token asks
    for it.

    \b
    radixfleet workers drain worker-0 --api-key @admin-token
    radixfleet workers resume worker-0 --api-key @admin-token
    radixfleet workers remove 10.0.0.9:7080 --api-key @admin-token
    """
    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return
    if watch:
        asyncio.run(_watch(endpoint, as_json=as_json))
    entries = asyncio.run(_workers(endpoint))
    if as_json:
        click.echo(json.dumps({"workers": [dataclasses.asdict(entry) for entry in entries]}))
        return
    console = new_console()
    if not entries:
        console.print(_no_workers(endpoint))
        return
    print_whole(console, workers_table(entries))
    pools = pools_table(entries)
    if pools.row_count:
        console.print()
        print_whole(console, pools)
    for entry in entries:
        for advice in entry.info.advice:
            console.print(f"\n{entry.worker_id}: {advice}", style="yellow", soft_wrap=True)


@workers.command()
@click.argument("worker_id", metavar="WORKER")
@click.option(
    "--grace",
    "grace_s",
    type=Number(0),
    metavar="SECONDS",
    help="Abort what still runs after so many seconds; default: the worker's --drain-grace-s.",
)
@json_option
@endpoint_option
def drain(worker_id: str, grace_s: float | None, endpoint: Endpoint, *, as_json: bool) -> int:
    """Send WORKER nothing new, and wait until it is empty. It serves nothing until it is resumed.

    \b
    radixfleet workers drain worker-0
    radixfleet workers drain worker-0 --grace 30 --json | jq .aborted_requests

    Interrupted, the command stops waiting; the worker still gets nothing new until it is resumed. Resumed by somebody
    else meanwhile, the worker is not empty, and the command fails (1).
    """
    outcome = asyncio.run(_drain(endpoint, worker_id, grace_s, tells=not as_json))
    counts = f"{counted(outcome.finished_requests, 'request')} finished, {outcome.aborted_requests} aborted"
    if as_json:
        click.echo(json.dumps({"worker": worker_id, **dataclasses.asdict(outcome)}))
    if outcome.resumed:
        click.echo(f"{worker_id} was resumed meanwhile, is not empty: {counts}. It serves again", err=True)
        return _FAILED
    if as_json:
        return 0
    click.echo(f"{worker_id} is empty: {counts}. Back to work: radixfleet workers resume {worker_id}")
    for model in _unserved_without(worker_id, asyncio.run(_workers(endpoint))):
        click.echo(f"nobody serves {model} now: its requests are refused until a worker is back", err=True)
    return 0


@workers.command()
@click.argument("worker_id", metavar="WORKER")
@endpoint_option
def resume(worker_id: str, endpoint: Endpoint) -> None:
    """Put WORKER, drained or still draining, back to work.

    \b
    radixfleet workers resume worker-0
    """
    click.echo(f"{worker_id} {asyncio.run(_resume(endpoint, worker_id))}")


@workers.command()
@click.argument("worker_id", metavar="WORKER")
@endpoint_option
def remove(worker_id: str, endpoint: Endpoint) -> None:
    """Have the router forget WORKER, an id or an address: one that is gone for good, or was registered by mistake.

    \b
    radixfleet workers remove 10.0.0.9:7080

    What runs there goes on. A worker that lives and names this router by --routers is back within seconds; one that
    the router names by --workers is back when the router starts again.
    """
    asyncio.run(_remove(endpoint, worker_id))
    click.echo(f"{worker_id} is removed")


def _unserved_without(worker_id: str, entries: Sequence[WorkerEntry]) -> list[str]:
    """The worker's model, if no other worker serves it."""
    served = {
        entry.info.model.model for entry in entries if entry.worker_id != worker_id and not entry.ineligible_reason
    }
    return [
        entry.info.model.model
        for entry in entries
        if entry.worker_id == worker_id and entry.info.model.model not in served
    ]


def _refuse_options_before(context: click.Context) -> None:
    """An endpoint in front of the subcommand would be another than the subcommand's own, without a word."""
    for parameter in context.command.params:
        name = str(parameter.name)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option, command = parameter.opts[0], context.invoked_subcommand
            if name == "watch":
                raise click.UsageError("--watch goes with the list alone: radixfleet workers --watch")
            raise click.UsageError(f"give {option} behind {command}: radixfleet workers {command} WORKER {option} ...")


async def _watch(endpoint: Endpoint, *, as_json: bool) -> Never:
    """Until the router stops or is lost, which is an error."""
    known: Sequence[WorkerEntry] | None = None
    uptime_s, is_settling = 0.0, False
    async with Client(endpoint) as client:
        waiting = _say_later(f"waiting for the router at {endpoint}", _AWAITED_S)
        async for report in client.watch_fleet():
            waiting.cancel()
            waiting = _say_later(f"nothing comes from the router at {endpoint}: waiting for it", _MISSED_S)
            workers = report.workers
            if as_json:
                if report.workers != known:  # reports of the fleet alone come too
                    click.echo(json.dumps({"workers": [dataclasses.asdict(entry) for entry in report.workers]}))
            elif known is None:
                console = new_console()
                print_whole(console, workers_table(report.workers))
                console.print(_no_workers(endpoint) if not report.workers else "")
            else:
                if report.fleet.uptime_s < uptime_s:
                    is_settling = True
                    _tell("the router was started again: what its workers do is told when it knows them")
                is_settling = is_settling and report.fleet.uptime_s < SETTLED_S
                workers = tuple(heard(known, report.workers, is_settling=is_settling))
                for change in changes(known, workers):
                    _tell(change)
            known, uptime_s = workers, report.fleet.uptime_s
    raise AssertionError("a watched fleet ends with an error")


def _tell(change: str) -> None:
    click.echo(f"{datetime.now():%H:%M:%S}  {change}")


def _say_later(text: str, delay_s: float) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, partial(click.echo, text, err=True))


def _no_workers(endpoint: Endpoint) -> str:
    return f"{endpoint} knows no workers; start one: radixfleet worker --model demo --routers {endpoint}"


async def _workers(endpoint: Endpoint) -> list[WorkerEntry]:
    async with Client(endpoint) as client:
        return await client.list_workers()


async def _drain(endpoint: Endpoint, worker_id: str, grace_s: float | None, *, tells: bool) -> DrainOutcome:
    """A refusal comes at once, and so does the end where nothing runs; `tells`: else say what is waited for."""
    async with Client(endpoint) as client:
        draining = asyncio.create_task(client.drain(worker_id, grace_s=grace_s))
        try:
            done, _ = await asyncio.wait([draining], timeout=_QUIET_S)
            if tells and not done:
                click.echo(f"draining {worker_id}: it gets nothing new; waiting for what it runs", err=True)
            return await draining
        finally:
            draining.cancel()


async def _remove(endpoint: Endpoint, worker_id: str) -> None:
    async with Client(endpoint) as client:
        await client.remove(worker_id)


async def _resume(endpoint: Endpoint, worker_id: str) -> str:
    """What became of it, which depends on what it was."""
    async with Client(endpoint) as client:
        before = [entry for entry in await client.list_workers() if worker_id in (entry.worker_id, entry.address)]
        await client.resume(worker_id)
    reason = before[0].ineligible_reason if before else "draining"
    if reason == "draining":
        return "serves again"
    if not reason:
        return "was not drained: it serves, as it did"
    return f"is not drained, but gets no requests yet: {reason}"

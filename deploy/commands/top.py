"""`radixfleet top`: the fleet, live, in the terminal."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

import click
from rich.console import Console

from deploy.consoles import new_console
from deploy.endpoints import endpoint_option
from deploy.numbers import Number
from deploy.options import json_option
from deploy.top.app import Top, has_terminal
from deploy.top.screen import Frame, once
from deploy.top.view import SORTS, View
from radixfleet.client import Client
from radixfleet.clock import MonotonicClock
from radixfleet.endpoint import Endpoint
from radixfleet.overview import Overview, overview
from radixfleet.retry import RetryPolicy

_TIMEOUT_S = 3.0
_PIPE_WIDTH = 120
"""Where there is no terminal that has a width."""


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=Number(0.2, 3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "--sort", type=click.Choice(list(SORTS), case_sensitive=False), default="worker", show_default=True, help="Order."
)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--once", "is_once", is_flag=True, help="Print it once, and end.")
@json_option
@endpoint_option
def top(endpoint: Endpoint, sort: str, interval_s: float, *, reverse: bool, is_once: bool, as_json: bool) -> None:
    """Watch a fleet: its speed and hit rate, and every worker's state, requests, KV pool, TTFT and bubble.

    \b
    radixfleet top
    radixfleet top --sort tokens/s --endpoint 10.0.0.1:7070
    radixfleet top --once
    radixfleet top --once --json | jq '.workers[] | [.worker, .pace.hit_rate]'
    radixfleet top --json | jq -c .fleet.pace

    Speeds are averages over the last 10 seconds; hit rate, TTFT and bubble are over the last minute. The screen goes on
    when the router restarts. Without a terminal the table is printed again and again; without a router it ends with an
    error then. Press ? for the keys.
    """
    view = View(sort=sort, reverse=reverse)
    if is_once:
        _print_once(asyncio.run(_look(endpoint)), endpoint, view, as_json=as_json)
    else:
        asyncio.run(_watch(endpoint, view, interval_s, as_json=as_json))


async def _look(endpoint: Endpoint) -> Overview:
    async with Client(endpoint, timeout_s=_TIMEOUT_S) as client:
        return overview(await client.fleet())


def _print_once(seen: Overview, endpoint: Endpoint, view: View, *, as_json: bool) -> None:
    if as_json:
        click.echo(_json(seen))
        return
    console = _console()
    console.print(once(Frame(str(endpoint), seen), view, width=console.width))


async def _watch(endpoint: Endpoint, view: View, interval_s: float, *, as_json: bool) -> None:
    async with Client(endpoint, timeout_s=_TIMEOUT_S, retry=RetryPolicy(retries=0)) as client:
        if as_json:
            while True:
                click.echo(_json(overview(await client.fleet())))
                await asyncio.sleep(interval_s)
        console = _console()
        running = Top(client.fleet, str(endpoint), MonotonicClock(), interval_s=interval_s, view=view)
        if has_terminal(console):
            await running.show(console, sys.stdin.fileno())
        else:
            await running.print_on(console)


def _console() -> Console:
    console = new_console()
    return console if console.is_terminal else new_console(width=_PIPE_WIDTH)


def _json(seen: Overview) -> str:
    return json.dumps(dataclasses.asdict(seen))

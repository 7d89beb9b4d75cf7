"""`radixfleet workers`: the fleet as its router sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import click
from rich.console import Console

from deploy.options import endpoint_option, json_option
from deploy.tables import pools_table, workers_table
from radixfleet.answers import WorkerEntry
from radixfleet.client import Client
from radixfleet.endpoint import Endpoint


@click.command()
@json_option
@endpoint_option
def workers(endpoint: Endpoint, *, as_json: bool) -> None:
    """List the workers that a router knows: their state, load, cache and memory pools.

    \b
    radixfleet workers
    radixfleet workers --json | jq '.workers[].load'
    """
    entries = asyncio.run(_workers(endpoint))
    if as_json:
        click.echo(json.dumps({"workers": [dataclasses.asdict(entry) for entry in entries]}))
        return
    console = Console(highlight=False)
    if not entries:
        console.print(f"{endpoint} knows no workers; start one: radixfleet worker --model demo --routers {endpoint}")
        return
    console.print(workers_table(entries))
    console.print()
    console.print(pools_table(entries))
    for entry in entries:
        for advice in entry.info.advice:
            console.print(f"\n[yellow]{entry.worker_id}: {advice}[/yellow]", soft_wrap=True)


async def _workers(endpoint: Endpoint) -> list[WorkerEntry]:
    async with Client(endpoint) as client:
        return await client.list_workers()

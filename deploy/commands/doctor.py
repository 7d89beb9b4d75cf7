"""`radixfleet doctor`: what this machine gives a worker, and what to change."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from deploy.inspection import Finding, as_objects, inspect
from deploy.options import json_option
from radixfleet.settings import parse_bytes
from worker.model.sources import resolve_model


@click.command()
@click.option("--model", help="Look at a model too: demo, a Hugging Face directory or a .gguf file.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--device-memory", metavar="SIZE", help="As for a worker: 8GiB, say.")
@json_option
def doctor(model: str | None, device: str, device_memory: str | None, *, as_json: bool) -> None:
    """Tell what device, dtype, memory and settings a worker gets on this machine, and what to change.

    \b
    radixfleet doctor
    radixfleet doctor --model ./Qwen3-0.6B --device-memory 8GiB
    """
    try:
        memory = parse_bytes(device_memory) if device_memory is not None else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device-memory") from None
    path = resolve_model(model, lambda text: click.echo(text, err=True)) if model is not None else None
    findings = inspect(path, device, memory)
    if as_json:
        click.echo(json.dumps({"findings": as_objects(findings)}, indent=2))
    else:
        Console(highlight=False).print(_table(findings))


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for finding in findings:
        table.add_row(finding.topic, finding.fact)
        if finding.advice:
            table.add_row("", f"[yellow]-> {finding.advice}[/yellow]")
    return table

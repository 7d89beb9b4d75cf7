"""`radixfleet doctor`: what this machine gives a worker, or what a model would take of any device."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table
from rich.text import Text

from deploy.consoles import new_console
from deploy.doctor.devices import find_device
from deploy.doctor.plan_report import as_object, print_report
from deploy.doctor.planning import Wanted, find_shape, fits
from deploy.numbers import Number
from deploy.options import json_option
from deploy.progress import Progress
from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.settings import parse_bytes
from worker.model.footprint import FORMATS
from worker.model.sources import resolve_model

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DTYPES = [*FORMATS, *_SHORT]
_AS = "With --plan, as for a worker."


def _divides_a_block(_context: click.Context, _parameter: click.Parameter, page_size: int) -> int:
    if BLOCK_TOKENS % page_size:
        raise click.BadParameter(f"must divide {BLOCK_TOKENS}, the tokens of a block; got {page_size}")
    return page_size


@click.command()
@click.option(
    "--model", help="demo, a Hugging Face directory or a .gguf file; with --plan also a config.json or a name."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N; with --plan: H100-80.")
@click.option("--device-memory", metavar="SIZE", help="As for a worker: 8GiB, say.")
@click.option("--plan", is_flag=True, help="Plan a model's memory on a device, having neither.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="bfloat16", show_default=True, help="With --plan.")
@click.option("--mem-fraction-static", type=Number(0, 1, min_open=True, max_open=True), default=0.9, help=_AS)
@click.option("--page-size", type=click.IntRange(1, 64), default=16, callback=_divides_a_block, help=_AS)
@click.option("--context-length", type=click.IntRange(2), help=_AS)
@click.option("--chunked-prefill-size", type=click.IntRange(1), help=_AS)
@click.option("--max-running-requests", type=click.IntRange(1, 4096), help=_AS)
@click.option("--cuda-graphs/--no-cuda-graphs", default=True, show_default=True, help=_AS)
@json_option
def doctor(
    model: str | None, device: str, device_memory: str | None, dtype: str, *, plan: bool, as_json: bool, **settings: Any
) -> None:
    """Tell what device, dtype, memory and settings a worker gets on this machine, and what to change.

    \b
    radixfleet doctor
    radixfleet doctor --model ./Qwen3-0.6B --device-memory 8GiB

    With --plan: the three memory pools of any model on any device, how each number comes about, which bound binds, and
    what would fit where this does not. The settings are a worker's. Exit code 1 when it does not fit.

    \b
    radixfleet doctor --plan --model llama-3.1-70b --device H100-80 --dtype fp8
    radixfleet doctor --plan --model ./my-model/config.json --device 24GiB --context-length 8192
    radixfleet doctor --plan --model smollm2-135m --device 1GiB --no-cuda-graphs
    """
    if plan:
        _plan(model, device_memory or device, _SHORT.get(dtype, dtype), as_json=as_json, **settings)
    else:
        _refuse_given(["dtype", *settings])
        _inspect(model, device, device_memory, as_json=as_json)


def _plan(model: str | None, device: str, dtype: str, *, as_json: bool, **settings: Any) -> None:
    if model is None or device in ("auto", "cpu", "cuda"):
        raise click.UsageError("--plan needs a --model and a --device: H100-80 or 24GiB, say")
    try:
        source, config = find_shape(model)
        wanted = Wanted(model, source, config, FORMATS[dtype], find_device(device), **settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps(as_object(wanted), indent=2))
    else:
        print_report(new_console(soft_wrap=True), wanted)
    if fits(wanted) is None:
        raise click.exceptions.Exit(1)


def _refuse_given(names: list[str]) -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{'/'.join([*parameter.opts, *parameter.secondary_opts])} goes with --plan")


def _inspect(model: str | None, device: str, device_memory: str | None, *, as_json: bool) -> None:
    try:
        memory = parse_bytes(device_memory) if device_memory is not None else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device-memory") from None
    path = resolve_model(model, lambda text: click.echo(text, err=True)) if model is not None else None
    with Progress(new_console(stderr=True)) as tell:
        # Here, because torch takes seconds to import and a plan needs none.
        tell("loading torch")
        from deploy.doctor.inspection import as_objects, inspect
        from worker.runner.devices import DeviceError

        tell("trying device and kernels (which are compiled once)")
        try:
            findings = inspect(path, device, memory)
        except DeviceError as error:
            raise click.BadParameter(str(error), param_hint="--device") from None
    if as_json:
        click.echo(json.dumps({"findings": as_objects(findings)}, indent=2))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for finding in findings:
            table.add_row(finding.topic, finding.fact)
            if finding.advice:
                table.add_row("", Text(f"-> {finding.advice}", "yellow"))
        new_console().print(table)

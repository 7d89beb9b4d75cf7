"""Options that several commands share, and options passed on to a child process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from deploy.endpoints import Command
from deploy.numbers import Number
from loadtest.trace import ID_TOKENS


class Several(click.ParamType[tuple[Any, ...]]):
    """Values of one type with commas between them; gives a tuple of them, each once."""

    def __init__(self, each: click.ParamType[Any]) -> None:
        self.each = each
        self.name = f"{each.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Raises BadParameter for a part that the type refuses."""
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(dict.fromkeys(self.each.convert(part, param, ctx) for part in parts))


def _check_folder(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """Before a run of minutes, and not after it."""
    if value is not None and not os.access(value.parent, os.W_OK):
        raise click.BadParameter(f"cannot write to the folder {value.parent}")
    return value


def objective_options(command: Command) -> Command:
    """Adds `--slo-ttft` and `--slo-itl`: what a request must keep to count as good, in seconds."""
    within = click.option(
        "--slo-ttft",
        type=Number(0),
        default=1.0,
        show_default=True,
        help="A good request has its first token within so many seconds,",
    )
    apart = click.option(
        "--slo-itl",
        type=Number(0),
        default=0.05,
        show_default=True,
        help="and the others so many seconds apart on average.",
    )
    return within(apart(command))


def id_tokens_option(command: Command) -> Command:
    """Adds `--id-tokens`, of traces."""
    return click.option(
        "--id-tokens",
        type=click.IntRange(min=1),
        default=ID_TOKENS,
        show_default=True,
        help="Tokens that each hash id of a trace stands for.",
    )(command)


def report_option(command: Command) -> Command:
    """Adds `--report`: a file for an HTML page, in a folder that is there."""
    return click.option(
        "--report",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_check_folder,
        help="Write an HTML page with charts.",
    )(command)


def json_option(command: Command) -> Command:
    """Adds `--json`: one JSON object for a program instead of text for people."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(command)


def to_arguments(values: Mapping[str, Any]) -> list[str]:
    """Options by field name, as a command made by `radixfleet.settings.click_options` received them, as arguments.

    What was not given (None, or an empty tuple) is left out, so that the child looks for it where it would itself.
    """
    arguments: list[str] = []
    for name, value in values.items():
        option = name.replace("_", "-")
        if value is None or value == ():
            continue
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            arguments += [part for item in value for part in (f"--{option}", str(item))]
        else:
            arguments += [f"--{option}", str(value)]
    return arguments

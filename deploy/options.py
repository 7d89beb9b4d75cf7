"""Options that several commands share, and options passed on to a child process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_PORT = 7070
DEFAULT_ENDPOINT = f"127.0.0.1:{DEFAULT_PORT}"


def _check_endpoint(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(f"must be host:port, with a port from 1 to 65535; got {value!r}")
    return value


def endpoint_option(command: Command) -> Command:
    """Adds `--endpoint`: the router, or a worker, to call."""
    return click.option(
        "--endpoint",
        metavar="HOST:PORT",
        envvar="RADIXFLEET_ENDPOINT",
        default=DEFAULT_ENDPOINT,
        show_default=True,
        show_envvar=True,
        callback=_check_endpoint,
        help="Router, or worker, to call.",
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

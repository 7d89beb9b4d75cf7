"""The `radixfleet` command: finds the subcommand, and turns errors into one line on stderr and an exit code.

0 done   1 failed   2 wrong usage or settings   3 the server cannot be reached or cannot serve now
4 the server refused the request   130 interrupted
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence

import click

from deploy.interrupts import INTERRUPTED, ending_quietly
from deploy.processes import PARENT_VARIABLE, ChildFailed
from radixfleet.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PermissionDenied,
    RadixfleetError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownWorker,
)
from radixfleet.lifeline import die_with_parent
from radixfleet.os_errors import reason_of
from radixfleet.watched_file import UnusableFile
from worker.model.errors import ModelError, ModelNotGiven

FAILED, USAGE, UNREACHABLE, REFUSED = 1, 2, 3, 4

COMMANDS: Mapping[str, str] = {
    "demo": "Start a router and two workers, chat with them, show what the cache did, stop.",
    "up": "Run a fleet on this machine: a router and workers.",
    "fleet": "Run a fleet on a Ray cluster, from a file.",
    "chat": "Talk to a model; the answer streams, and every turn shows what came from the cache.",
    "generate": "Generate one completion for a prompt.",
    "explain": "Show where a prompt would go, and why, without sending it.",
    "workers": "List the workers that a router knows.",
    "top": "Watch a fleet, live, in the terminal.",
    "keys": "Make keys for clients, and the admin token of a fleet.",
    "lab": "Compare routing policies on a simulated fleet, without a GPU.",
    "doctor": "Tell what this machine gives a worker, and what to change.",
    "monitoring": "Write what Prometheus and Grafana need to show a fleet.",
    "bench": "Load a fleet and tell hit rate, latencies, throughput; measure what overlapped scheduling hides.",
    "worker": "Run one worker.",
    "router": "Run one router.",
}


class _Commands(click.Group):
    """Imports `deploy.commands.NAME` when NAME is called; listing the commands imports nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with ending_quietly():
            module = importlib.import_module(f"deploy.commands.{cmd_name}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and (alike := difflib.get_close_matches(args[0], COMMANDS, 1)):
            raise click.UsageError(f"there is no command {args[0]!r}; did you mean {alike[0]!r}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 server not reached or not serving, "
    "4 request refused, 130 interrupted.",
)
@click.version_option(package_name="radixfleet")
def cli() -> None:
    """Serve large language models on a fleet of GPUs, or of CPUs.

    \b
    Try it:      radixfleet demo
    Keep it up:  radixfleet up --workers 2 --model demo
    Talk to it:  radixfleet chat
    """


def run() -> None:
    """The whole command. Never returns."""
    if parent := os.environ.pop(PARENT_VARIABLE, None):
        die_with_parent(int(parent))
    if sys.stdin is None:  # closed, as some leave it who start programs
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  until the process ends
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what no terminal shows, and what is no text, is a question mark
            stream.reconfigure(errors="replace")
    sys.exit(_run())


def _run() -> int:
    try:
        code = cli(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (RadixfleetError, ChildFailed, ModelError) as error:
        click.echo(f"radixfleet: {error}{_hint(error)}", err=True)
        return _exit_code(error)
    except OSError as error:  # a folder that cannot be made, a disk that is full
        click.echo(f"radixfleet: {reason_of(error)}", err=True)
        return USAGE if isinstance(error, UnusableFile) else FAILED
    return code if isinstance(code, int) else 0


def _exit_code(error: Exception) -> int:
    if isinstance(error, InvalidRequest | UnknownModel | UnknownWorker | Unauthenticated | PermissionDenied):
        return REFUSED
    if isinstance(error, ModelNotGiven):
        return USAGE
    return UNREACHABLE if isinstance(error, Unavailable | DeadlineExceeded) else FAILED


_HINTS: Sequence[tuple[type[RadixfleetError], Sequence[str], str]] = (
    # First: its text has what stands for TLS below.
    (
        Unavailable,
        ("before receiving SETTINGS", "tcp handshaker shutdown"),
        "Something takes connections there and says nothing: is the process stopped, or is that no gRPC port?",
    ),
    (
        Unavailable,
        ("CERTIFICATE_VERIFY_FAILED",),
        "The server's certificate is not signed by --tls-ca, or has expired. A self-signed one is its own --tls-ca.",
    ),
    (
        Unavailable,
        ("Hostname Verification",),
        "The server's certificate does not name that host: use a name it has, in --endpoint or in --tls-peer-name.",
    ),
    (
        Unavailable,
        ("WRONG_VERSION_NUMBER",),
        "That port speaks no TLS: leave out --tls-ca, or name the gRPC port in --endpoint.",
    ),
    # A server that hears plain text, or is shown no certificate or a wrong one, just ends the connection.
    (
        Unavailable,
        ("Socket closed", "andshake", "SSL"),
        "With TLS the server may want --tls-ca; if that is given, a certificate (--tls-cert, --tls-key) that its "
        "--tls-client-ca signed.",
    ),
    (
        Unavailable,
        ("Failed parsing HTTP/2", "ALPN"),
        "Is that the port of HTTP, or of metrics? --endpoint is the gRPC port: 7070 unless --port said otherwise.",
    ),
    (
        Unavailable,
        ("nothing answers at",),  # Ray has other words, and a hint of its own
        "Does a router or worker run there? `radixfleet up --model demo` starts both; --endpoint names another place.",
    ),
    (Unauthenticated, ("key",), "Give it by --api-key @FILE, or in RADIXFLEET_API_KEY."),
)
"""Kinds of errors, what their text has, and what to say beside it."""


def _hint(error: Exception) -> str:
    if isinstance(error, RadixfleetError) and "delivered_tokens" in error.metadata:
        return ""  # the connection worked until it broke
    for kind, signs, hint in _HINTS:
        if isinstance(error, kind) and any(sign in str(error) for sign in signs):
            return f"\n{hint}"
    return ""

"""`radixfleet keys`: makes the keys of clients, and the admin token."""

from __future__ import annotations

import os
from pathlib import Path

import click

from radixfleet.keys import key_line, new_key


@click.group()
def keys() -> None:
    """Make keys for clients, and the admin token of a fleet.

    \b
    radixfleet keys new alice --file keys.txt     # prints the key, and adds its hash to the file
    radixfleet keys new --token > admin-token     # for router, workers and operators
    radixfleet up --model demo --api-keys keys.txt --admin-token @admin-token
    RADIXFLEET_API_KEY=rfk_... radixfleet chat
    """


@keys.command()
@click.argument("name", required=False)
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the line to this file of --api-keys; running servers see it within a second.",
)
@click.option("--token", "is_token", is_flag=True, help="Make an admin token instead: it has no name and no line.")
def new(name: str | None, path: Path | None, *, is_token: bool) -> None:
    """Make a key for the client NAME. The key is shown once; what servers keep is its line, NAME:SHA256.

    \b
    radixfleet keys new alice
    radixfleet keys new alice --file keys.txt
    radixfleet keys new --token
    """
    key = new_key()
    if is_token:
        if name is not None or path is not None:
            raise click.UsageError("--token goes without NAME and --file: a token is kept as it is, by `> FILE`")
        click.echo(key)
        return
    if name is None:
        raise click.UsageError("NAME is missing: whose key is it? (or --token)")
    try:
        line = key_line(name, key)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if path is None:
        click.echo(f"key   {key}\nline  {line}")
        click.echo("Give the key to the client, and the line to --api-keys.", err=True)
        return
    _append(path, line)
    click.echo(key)
    click.echo(f"{path} has its line now. The key is not kept anywhere: give it to {name}.", err=True)


def _append(path: Path, line: str) -> None:
    """A new file is for its owner alone. A last line without its end is ended first."""
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+", encoding="utf-8") as file:
            text = file.read()
            file.write(("" if not text or text.endswith("\n") else "\n") + line + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot add to {path}: {error}") from None

"""`radixfleet keys`: makes the keys of clients, the admin token, and certificates."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from deploy.commands.certificates import certificates
from radixfleet.keys import key_line, name_of, names_in, new_key, watch_keys
from radixfleet.os_errors import reason_of


@click.group()
def keys() -> None:
    """Make keys for clients, the admin token of a fleet, and certificates.

    \b
    radixfleet keys new alice --file keys.txt     # prints the key, and adds its hash to the file
    radixfleet keys new --token > admin-token     # for router, workers and operators
    radixfleet keys certificates --host 10.0.0.1 --client me
    radixfleet up --model demo --api-keys keys.txt --admin-token @admin-token
    RADIXFLEET_API_KEY=rfk_... radixfleet chat
    """


keys.add_command(certificates)


@keys.command()
@click.argument("name", required=False)
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the line to this file of --api-keys; running servers see it within a second.",
)
@click.option("--add", "is_added", is_flag=True, help="A further key for NAME, beside the one that the file has.")
@click.option("--replace", "is_replaced", is_flag=True, help="Take away the keys that NAME has in the file.")
@click.option("--token", "is_token", is_flag=True, help="Make an admin token instead: it has no name and no line.")
def new(name: str | None, path: Path | None, *, is_added: bool, is_replaced: bool, is_token: bool) -> None:
    """Make a key for the client NAME. The key is shown once; what servers keep is its line, NAME:SHA256.

    \b
    radixfleet keys new alice
    radixfleet keys new alice --file keys.txt
    radixfleet keys new alice --file keys.txt --add         # for a change of keys: both are good meanwhile
    radixfleet keys new alice --file keys.txt --replace     # the old one is no longer
    radixfleet keys new --token
    """
    if (is_added or is_replaced) and (path is None or (is_added and is_replaced)):
        raise click.UsageError(
            "--add or --replace says what becomes of NAME's keys in --file: one of them, with --file"
        )
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
    with _writable(path):
        if path.is_file():
            watch_keys([str(path)])  # what servers would refuse is not made longer
        if not is_added and not is_replaced and (others := names_in(path).count(name)):
            raise click.ClickException(
                f"{path} has {others} key{'s' if others > 1 else ''} of {name}: --add another one, or --replace"
            )
        if is_replaced:
            _replace(path, name, line)
        else:
            _append(path, line)
    click.echo(key)
    click.echo(f"{path} has its line now. The key is not kept anywhere: give it to {name}.", err=True)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise click.ClickException(f"cannot add to {path}: {reason}") from None


def _append(path: Path, line: str) -> None:
    """A new file is for its owner alone. A last line without its end is ended first."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+", encoding="utf-8") as file:
        text = file.read()
        file.write(("" if not text or text.endswith("\n") else "\n") + line + "\n")


def _replace(path: Path, name: str, line: str) -> None:
    """Servers see the file as it was, or as it shall be. Its owner and mode stay; all other lines, too."""
    if not path.exists():
        _append(path, line)
        return
    file = path.resolve()
    kept = [each for each in file.read_text(encoding="utf-8").splitlines() if name_of(each) != name]
    descriptor, new = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            target.write("\n".join([*kept, line]) + "\n")
        status = file.stat()
        os.chmod(new, stat.S_IMODE(status.st_mode))
        os.chown(new, status.st_uid, status.st_gid)
        os.replace(new, file)
    except OSError:
        os.unlink(new)
        raise

"""What an operator says of engines that cannot say it themselves: their key, and their models' tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr

from radixfleet.clock import Clock
from radixfleet.text import Tokenizer
from radixfleet.tokenizer_files import spec_from_directory
from radixfleet.watched_file import UnusableFile, Watched, read_file


def engine_key(setting: SecretStr | None, clock: Clock) -> Callable[[], str | None]:
    """The key now: of a file that is named as `@FILE`, as it is now. Raises UnusableFile."""
    value = None if setting is None else setting.get_secret_value()
    if value is None or not value.startswith("@"):
        key = None if value is None else _checked(value, "the setting engine_api_key")
        return lambda: key
    path = Path(value[1:])
    return Watched([path], lambda: _checked(read_file(path).decode(errors="replace").strip(), str(path)), clock).current


def named_tokenizers(entries: Sequence[str]) -> Mapping[str, Tokenizer]:
    """By model, from MODEL=DIRECTORY each. Reads files. Raises UnusableFile."""
    tokenizers = {}
    for entry in entries:
        model, equals, directory = entry.rpartition("=")
        if not (model and equals and directory):
            raise UnusableFile(f"the setting tokenizers must be MODEL=DIRECTORY, got {entry!r}")
        try:
            tokenizers[model] = Tokenizer(spec_from_directory(Path(directory)))
        except ValueError as error:
            raise UnusableFile(f"the setting tokenizers: {error}") from error
    return tokenizers


def _checked(key: str, origin: str) -> str:
    """What can stand in a header. The key itself stays out of the message."""
    if not key.isascii() or not key.isprintable() or not key:
        raise UnusableFile(f"{origin} holds no key that can be sent: one line of ASCII is needed")
    return key

"""API keys and the admin token: made here, kept as hashes, known by name.

A key is 32 random bytes, so a plain SHA-256 of it is safe to keep: there is nothing to guess by dictionary. What an
operator stores is a line `name:sha256`, which `radixfleet keys new` prints beside the key. A key is found by looking up
its hash, so the time that takes tells nothing about the keys there are.

The admin token is kept as it is, because routers and workers show it to each other.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from radixfleet.clock import Clock
from radixfleet.watched_file import UnusableFile, Watched, read_file

KEY_PREFIX = "rfk_"
"""So that a key is recognised where it should not be, in a log or a commit."""
ADMIN = "admin"
"""The name under which the holder of the admin token is logged; no key may have it."""
MIN_TOKEN_LENGTH = 16

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(r"([^:\s]+):([0-9a-fA-F]{64})")

KeyRing = Mapping[str, str]
"""SHA-256 of a key, in lower-case hexadecimal -> the key's name."""


def new_key() -> str:
    """A key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """The hash that is stored in place of a key: lower-case hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_line(name: str, key: str) -> str:
    """The line that lets `key` in as `name`. Raises ValueError when the name is none."""
    check_name(name)
    return f"{name}:{key_hash(key)}"


def check_name(name: str) -> None:
    """Raises ValueError unless `name` may be a key's."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a key's name is 1 to 64 letters, digits, '.', '_' and '-'; got {name!r}")
    if name == ADMIN:
        raise ValueError(f"no key may be called {ADMIN!r}: that is the holder of the admin token")


def is_line(text: str) -> bool:
    """Whether `text` is meant as a `name:sha256` line, and not as the path of a file of them."""
    return _LINE.fullmatch(text) is not None


def name_of(text: str) -> str | None:
    """Whose key a line of a file is; None: it is a comment, or empty, or wrong."""
    match = _LINE.fullmatch(text.partition("#")[0].strip())
    return None if match is None else match[1]


def names_in(path: Path) -> list[str]:
    """Whose keys a file has, once for each key; without a file nobody. Raises OSError and UnicodeDecodeError."""
    if not path.exists():
        return []
    names = map(name_of, path.read_text(encoding="utf-8").splitlines())
    return [name for name in names if name is not None]


def watch_keys(entries: Sequence[str], clock: Clock | None = None) -> Callable[[], KeyRing]:
    """The keys of `entries`, each a `name:sha256` line or a file of such lines, which is read again when it changes.

    Raises UnusableFile. A file may have empty lines and comments after '#'.
    """
    lines = [entry for entry in entries if is_line(entry)]
    paths = [Path(entry) for entry in entries if not is_line(entry)]

    def read() -> KeyRing:
        ring = _parse(lines, "the setting api_keys")
        for path in paths:
            ring.update(_parse(_lines_of(path), str(path)))
        return ring

    return Watched(paths, read, clock).current


def watch_token(setting: str, clock: Clock | None = None) -> Callable[[], Sequence[str]]:
    """The tokens of a setting: itself, or the lines of the file that it names as `@FILE`, read again when it changes.

    The first is the one to show; all are accepted, so that a fleet can go over from one to the next. Raises
    UnusableFile.
    """
    if not setting.startswith("@"):
        tokens = [_checked_token(setting, "the setting admin_token")]
        return lambda: tokens
    path = Path(setting[1:])

    def read() -> Sequence[str]:
        found = [_checked_token(line, str(path)) for line in _lines_of(path)]
        if not found:
            raise UnusableFile(f"{path} holds no token: `radixfleet keys new --token` makes one")
        return found

    return Watched([path], read, clock).current


def _parse(lines: Iterable[str], origin: str) -> dict[str, str]:
    ring: dict[str, str] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            # The line itself stays out of the message: it may be a key that was pasted by mistake.
            raise UnusableFile(f"{origin} must hold lines NAME:SHA256, as `radixfleet keys new NAME` prints them")
        try:
            check_name(match[1])
        except ValueError as error:
            raise UnusableFile(f"{origin}: {error}") from None
        ring[match[2].lower()] = match[1]
    return ring


def _lines_of(path: Path) -> list[str]:
    text = read_file(path).decode("utf-8", "replace")
    return [stripped for line in text.splitlines() if (stripped := line.partition("#")[0].strip())]


def _checked_token(token: str, origin: str) -> str:
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise UnusableFile(
            f"{origin}: an admin token is at least {MIN_TOKEN_LENGTH} characters of ASCII without spaces; "
            "`radixfleet keys new --token` makes one"
        )
    return token

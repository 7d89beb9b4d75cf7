"""Keys from a terminal, one at a time, without waiting for enter. POSIX terminals only."""

from __future__ import annotations

import asyncio
import codecs
import os
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1b[5~": "page-up",
    "\x1b[6~": "page-down",
    "\x1b": "esc",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "ctrl-c",
    "\x04": "ctrl-c",
}


def names(typed: str) -> list[str]:
    """The keys behind what a terminal sent at once. Sequences that mean nothing here are passed over."""
    found = []
    at = 0
    while at < len(typed):
        end = at + _length(typed[at:])
        key = typed[at:end]
        if key in _NAMES:
            found.append(_NAMES[key])
        elif len(key) == 1 and key.isprintable():
            found.append(key)
        at = end
    return found


def _length(typed: str) -> int:
    """Of the first key: an escape sequence goes on to its final letter."""
    if len(typed) < 2 or typed[0] != "\x1b" or typed[1] not in "[O":
        return 1
    if typed[1] == "O":
        return min(3, len(typed))
    return next((index + 1 for index in range(2, len(typed)) if "@" <= typed[index] <= "~"), len(typed))


@contextmanager
def pressed(terminal: int, on_key: Callable[[str], None]) -> Iterator[None]:
    """While the block lasts, `on_key` is called on the running loop with each key typed at file descriptor `terminal`.

    Ctrl-C is a key, and what is typed is not shown. The terminal is as before when the block is left.
    """
    loop = asyncio.get_running_loop()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    before = termios.tcgetattr(terminal)

    def read() -> None:
        data = os.read(terminal, 1024)
        if not data:  # the terminal is gone
            loop.remove_reader(terminal)
            on_key("q")
        for key in names(decoder.decode(data)):
            on_key(key)

    raw = termios.tcgetattr(terminal)
    raw[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
    termios.tcsetattr(terminal, termios.TCSANOW, raw)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)

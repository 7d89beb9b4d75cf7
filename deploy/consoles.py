"""Consoles of the command: they print what they are told as it is, in colours where a terminal shows them."""

from __future__ import annotations

from rich.console import Console


def new_console(*, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> Console:
    """On stdout, or on stderr. `width`: where the terminal's own, or 80 without one, will not do.

    Brackets are no markup: addresses have them (`[fd00::1]:7070`), and paths, and advice (`radixfleet[gpu]`).
    """
    return Console(stderr=stderr, width=width, soft_wrap=soft_wrap, highlight=False, markup=False)

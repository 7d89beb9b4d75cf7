"""What a command is waiting for: a spinner on a terminal, a line for each new text elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

Tell = Callable[[str], None]
"""Told, in words, what happens. Called often; the same text may come again."""


class Progress:
    """Used as a context manager; call it with what is happening now. The same text may come again.

    `console`: one of `deploy.consoles`.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console)
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()

    def __call__(self, text: str) -> None:
        """Say `text` from now on. A text of several lines is news, and stays."""
        if "\n" in text:
            self._console.print(text, soft_wrap=True)
        elif self._console.is_terminal:
            self._status.update(Text(text))
            self._status.start()
        elif text != self._last:
            self._console.print(text, soft_wrap=True)
        self._last = text

    def pause(self) -> None:
        """Leave the terminal to others until the next text."""
        self._status.stop()

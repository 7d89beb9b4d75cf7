"""Runs `radixfleet top`: asks the router once in a while, draws after every answer, key and change of size.

    poll (each `interval_s`) --FleetReport--> frame -.
    terminal ---------------------key----------> view -+-> draw
    SIGWINCH ------------------------------------------'

A router that does not answer is asked again and again; what it said last stays on the screen, with its age.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from deploy.top.keys import pressed
from deploy.top.screen import Frame, once, screen
from deploy.top.view import View
from radixfleet.answers import FleetReport
from radixfleet.clock import Clock
from radixfleet.errors import RadixfleetError
from radixfleet.overview import Overview, overview

Ask = Callable[[], Awaitable[FleetReport]]
"""One question to the router. Raises RadixfleetError."""

_SPEEDS = 120


class Top:
    """What is known, and how it is shown. On the event loop only."""

    def __init__(self, ask: Ask, endpoint: str, clock: Clock, *, interval_s: float, view: View) -> None:
        self._ask = ask
        self._clock = clock
        self._interval_s = interval_s
        self._frame = Frame(endpoint, None)
        self._heard_s = clock.now()
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)
        self._stirred = asyncio.Event()
        self.view = view

    @property
    def frame(self) -> Frame:
        """As of now."""
        silent_s = self._clock.now() - self._heard_s if self._frame.problem else 0.0
        return replace(self._frame, silent_s=silent_s, speeds=tuple(self._speeds))

    async def poll(self) -> None:
        """Ask once, and take in the answer or its absence."""
        try:
            seen = overview(await self._ask())
        except RadixfleetError as error:
            self._frame = replace(self._frame, problem=str(error))
        else:
            self._take(seen)
        self._stirred.set()

    def _take(self, seen: Overview) -> None:
        self._frame = replace(self._frame, overview=seen, problem="")
        self._heard_s = self._clock.now()
        self._speeds.append(seen.fleet.pace.output_tokens_per_s)

    async def show(self, console: Console, terminal: int) -> None:
        """On a terminal that fills with it and has keys, until the user quits."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._stirred.set)
        polling = asyncio.create_task(self._keep_polling(), name="poll")
        try:
            with pressed(terminal, self._on_key), Live(console=console, screen=True, auto_refresh=False) as live:
                while not self.view.is_over:
                    self._stirred.clear()
                    # The terminal's own word: COLUMNS, where a shell exports it, does not follow a change of size.
                    console.size = os.get_terminal_size(terminal)
                    width, height = console.size
                    live.update(screen(self.frame, self.view, width=width, height=height), refresh=True)
                    await self._stirred.wait()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            loop.remove_signal_handler(signal.SIGWINCH)

    async def print_on(self, console: Console) -> None:
        """Where there is no terminal: one table after another, until cancelled.

        A router that restarts is waited for. Raises RadixfleetError when there is none at first: nobody watches a pipe.
        """
        self._take(overview(await self._ask()))
        while True:
            console.print(once(self.frame, self.view, width=console.width))
            console.print()
            await asyncio.sleep(self._interval_s)
            await self.poll()

    async def _keep_polling(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(self._interval_s)

    def _on_key(self, key: str) -> None:
        workers = self._frame.overview.workers if self._frame.overview is not None else ()
        self.view = self.view.pressed(key, workers)
        self._stirred.set()


def has_terminal(console: Console) -> bool:
    """Whether there is one to draw on and to take keys from."""
    return console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()

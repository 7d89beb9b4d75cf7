"""Commands that put things in order before they end, whichever signal ends them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import click

Result = TypeVar("Result")


def run_interruptible(work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives. SIGTERM cancels it as Ctrl-C does: it stops what it has started, then Abort is raised."""

    async def run() -> Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            return await work
        except asyncio.CancelledError:
            if task.cancelling():
                raise click.Abort from None
            raise  # nobody has told it to end: a fault of ours

    return asyncio.run(run())


@contextmanager
def ctrl_c_calls(stop: Callable[[], None]) -> Iterator[None]:
    """While the block lasts, the first Ctrl-C calls `stop` on the event loop; the second one does what it did before.

    For the main thread, within `run_interruptible`.
    """
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        loop.call_soon_threadsafe(stop)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""A task that runs for as long as a block of code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run `work` as a task called `name` while the block lasts; at its end the task is cancelled and awaited.

    An exception that the task raised by then is raised at the end of the block.
    """
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        await _ended(task)
        if not task.cancelled():
            task.result()


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait until the task has ended, even if the waiter is cancelled meanwhile; that is raised afterwards."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _ended(task)
        raise

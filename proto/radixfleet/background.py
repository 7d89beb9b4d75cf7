"""Work that goes on beside a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """`work` goes on while the block lasts, as a task called `name`. Behind the block it has been cancelled, and ended.

    What it raises of its own accord comes out at the end of the block.
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
    """Who is cancelled meanwhile waits on, and is cancelled then."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _ended(task)
        raise

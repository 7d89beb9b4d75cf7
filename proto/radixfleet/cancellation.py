"""Whose end a CancelledError is."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether somebody cancels the current task.

    gRPC raises CancelledError, too, when a call is cut or its channel is closed under it. A task that nobody cancels
    must not take that for its own end.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

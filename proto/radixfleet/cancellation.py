"""Tells a task's own cancellation from a CancelledError that gRPC raises."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether somebody cancels the current task.

    gRPC raises CancelledError, too, when a call is cut or its channel is closed. A task that was not cancelled itself
    must handle that as a failed call, and go on.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

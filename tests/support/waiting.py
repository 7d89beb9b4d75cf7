"""Waiting for something to become true, in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(
    condition: Callable[[], object], what: str = "", *, timeout_s: float = 100.0, every_s: float = 0.002
) -> None:
    """Return once `condition()` is true. AssertionError when it never is."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  the one place where tests poll
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise AssertionError(f"waited {timeout_s} s in vain: {what or condition}") from None


def wait_until(condition: Callable[[], object], what: Callable[[], object] = str, *, timeout_s: float = 100.0) -> None:
    """`until` for threads without an event loop, and for conditions that cost a request. `what`: is told in vain."""
    ends_at_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends_at_s:
            raise AssertionError(f"waited {timeout_s} s in vain: {what() or condition}")
        time.sleep(0.05)

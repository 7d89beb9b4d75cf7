"""What is asked of an engine over HTTP, without an engine."""

from __future__ import annotations

import asyncio
import gc

import pytest

from radixfleet.clock import ManualClock
from radixfleet.errors import DeadlineExceeded
from router.dialects.http_connection import HttpConnection
from router.worker_address import engine_address


async def test_a_deadline_that_has_passed_asks_nothing_and_leaves_nothing_behind() -> None:
    """What was begun and never sent warned in the log of a coroutine that nobody awaits."""
    http = HttpConnection(
        engine_address("http://127.0.0.1:9"), ManualClock(), connect_timeout_s=1.0, api_key=lambda: None
    )
    with pytest.raises(DeadlineExceeded):
        await http.post("/completions", {}, {}, asyncio.get_running_loop().time() - 1.0)
    await http.close()
    gc.collect()

"""The demo's conversations."""

from __future__ import annotations

import asyncio
import io
from typing import Any, cast

import pytest
from rich.console import Console

from deploy.commands.demo import _conversations
from radixfleet.client import Client
from tests.support.waiting import until


class _Silent:
    """A client whose answers do not come."""

    def __init__(self) -> None:
        self.asked = self.cancelled = 0

    async def complete(self, *_: Any, **__: Any) -> None:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def test_a_demo_that_is_interrupted_leaves_no_question_behind() -> None:
    client = _Silent()
    talking = asyncio.create_task(_conversations(cast("Client", client), Console(file=io.StringIO()), 8))
    await until(lambda: client.asked == 2)
    talking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talking
    assert client.cancelled == 2

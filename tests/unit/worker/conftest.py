"""How the `worker` of a module is reached."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from radixfleet.channel import open_channel
from worker.app import Worker


@pytest.fixture
async def channel(worker: Worker) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(worker.address) as opened:
        yield opened

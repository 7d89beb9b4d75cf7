"""A worker's front on an engine that a test plays, and how it is asked. Modules with another worker give their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from radixfleet.v1 import inference_pb2_grpc
from tests.support.fake_engine import FakeEngine
from tests.support.worker_fixture import sim_worker
from worker.app import Worker


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def worker(engine: FakeEngine) -> AsyncIterator[Worker]:
    """Its engine is loading."""
    async with sim_worker(engine=engine, serving=False) as running:
        yield running


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(channel)

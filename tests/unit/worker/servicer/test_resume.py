"""The end of a drain that was asked for: the worker takes requests again, unless it is on its way out."""

import asyncio

import grpc.aio
import pytest

from radixfleet.channel import open_channel
from radixfleet.client import Client
from radixfleet.errors import Unavailable
from radixfleet.retry import RetryPolicy
from radixfleet.types import WorkerStatus
from radixfleet.v1 import worker_pb2, worker_pb2_grpc
from tests.support.waiting import until
from tests.support.worker_fixture import sim_runner, sim_worker
from worker.runner.sim import CostModel


async def test_a_drained_worker_takes_requests_again():
    async with (
        sim_worker() as worker,
        open_channel(worker.address) as channel,
        Client(worker.address, retry=RetryPolicy(retries=0)) as client,
    ):
        stub = worker_pb2_grpc.WorkerStub(channel)
        assert not (await stub.Drain(worker_pb2.DrainRequest(grace_s=1))).resumed
        with pytest.raises(Unavailable, match="draining"):
            await client.complete("hello", max_new_tokens=2)
        await stub.Resume(worker_pb2.ResumeRequest())
        assert worker.feed.status is WorkerStatus.SERVING
        assert (await client.complete("hello", max_new_tokens=2, ignore_eos=True)).usage.completion_tokens == 2


async def test_a_drain_that_waits_is_called_off_and_aborts_nothing():
    runner = sim_runner(cost=CostModel(step_s=0.02))
    async with (
        sim_worker(runner) as worker,
        open_channel(worker.address) as channel,
        Client(worker.address) as client,
    ):
        stub = worker_pb2_grpc.WorkerStub(channel)
        answer = asyncio.create_task(client.complete("hello", max_new_tokens=40, ignore_eos=True))
        await until(lambda: len(worker.requests))
        draining = asyncio.create_task(_drained(stub))
        await until(lambda: worker.feed.status is WorkerStatus.DRAINING)
        await stub.Resume(worker_pb2.ResumeRequest())
        drained = await draining
        assert (drained.finished_requests, drained.aborted_requests, drained.resumed) == (0, 0, True)
        assert (await answer).usage.completion_tokens == 40


async def test_a_worker_that_is_about_to_end_does_not_come_back():
    async with sim_worker() as worker, open_channel(worker.address) as channel:
        await worker.requests.drain(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker_pb2_grpc.WorkerStub(channel).Resume(worker_pb2.ResumeRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert worker.feed.status is WorkerStatus.DRAINING


async def _drained(stub: worker_pb2_grpc.WorkerStub) -> worker_pb2.DrainResponse:
    return await stub.Drain(worker_pb2.DrainRequest(grace_s=60))

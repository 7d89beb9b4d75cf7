"""The Worker service and the standard services beside it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from radixfleet.blocks import BLOCK_SCHEME, BLOCK_TOKENS
from radixfleet.channel import open_channel
from radixfleet.clock import MonotonicClock
from radixfleet.errors import InvalidRequest, Unavailable
from radixfleet.status import error_from_rpc
from radixfleet.text import TokenizerSpec
from radixfleet.types import WorkerStatus
from radixfleet.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.answers import collect, generate, read_failure, request
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_engine import READY, FakeEngine
from tests.support.played_answer import PlayedAnswer
from tests.support.waiting import until
from tests.support.worker_fixture import sim_runner, sim_worker
from worker.app import SERVICES, Worker
from worker.servicer.description import Description
from worker.servicer.link import Links, TimeRemaining
from worker.servicer.worker import TOKENIZER_CHUNK_BYTES, WorkerServicer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ENDLESS = {"max_new_tokens": 50_000, "ignore_eos": True}


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.WorkerStub:
    return worker_pb2_grpc.WorkerStub(channel)


async def test_info_says_what_is_known_while_loading_and_the_rest_after(
    engine: FakeEngine, stub: worker_pb2_grpc.WorkerStub
) -> None:
    info = await stub.GetInfo(worker_pb2.GetInfoRequest())
    assert (info.worker_id, info.model.model) == ("worker-0", "sim-model")
    assert info.status == worker_pb2.WORKER_STATUS_LOADING
    assert info.model.tokenizer_fingerprint == byte_spec().fingerprint()
    assert (info.block_scheme, info.block_tokens) == (BLOCK_SCHEME, BLOCK_TOKENS)
    assert info.version
    assert not info.HasField("capacity")
    engine.become_ready()
    info = await stub.GetInfo(worker_pb2.GetInfoRequest())
    assert info.status == worker_pb2.WORKER_STATUS_SERVING
    assert info.incarnation == engine.incarnation
    assert (info.capacity.kv_tokens, info.memory.bounded_by) == (READY.capacity.kv_tokens, "the test")
    assert (info.model.max_context_tokens, info.model.dtype) == (READY.max_context_tokens, "float32")
    assert not info.advice
    engine.report(advice={"decode": "fewer requests"})
    assert list((await stub.GetInfo(worker_pb2.GetInfoRequest())).advice) == ["fewer requests"]


async def test_the_tokenizer_comes_in_pieces_that_join(stub: worker_pb2_grpc.WorkerStub) -> None:
    chunks = [chunk.data async for chunk in stub.GetTokenizer(worker_pb2.GetTokenizerRequest())]
    assert TokenizerSpec.from_json(b"".join(chunks)) == byte_spec()


@asynccontextmanager
async def no_answer(
    request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining
) -> AsyncIterator[PlayedAnswer]:
    yield PlayedAnswer()


async def test_a_big_tokenizer_comes_in_pieces_of_a_megabyte(engine: FakeEngine, worker: Worker) -> None:
    spec = TokenizerSpec("x" * (5 * TOKENIZER_CHUNK_BYTES // 2), None, None, None, None, (), False, 1)
    servicer = WorkerServicer(
        Description(worker.description.worker_id, "m", spec),
        engine,
        worker.feed,
        worker.requests,
        Links(no_answer, MonotonicClock()),
        drain_grace_s=1,
    )
    chunks = [chunk.data async for chunk in servicer.GetTokenizer(worker_pb2.GetTokenizerRequest(), None)]
    assert [len(chunk) == TOKENIZER_CHUNK_BYTES for chunk in chunks] == [True, True, False]
    assert TokenizerSpec.from_json(b"".join(chunks)) == spec


async def test_health_tells_the_truth(engine: FakeEngine, worker: Worker, channel: grpc.aio.Channel) -> None:
    """Behaviour 60: NOT_SERVING while loading, failed and draining, for the server and for each service."""
    health = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="radixfleet.v1.Inference"))

    async def statuses() -> set[int]:
        checks = [health.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", *SERVICES)]
        return {(await check).status for check in checks}

    assert (await watch.read()).status == NOT_SERVING
    assert await statuses() == {NOT_SERVING}
    for act, expected in (
        (engine.become_ready, SERVING),
        (engine.crash, NOT_SERVING),
        (engine.become_ready, SERVING),
        (worker.feed.drain, NOT_SERVING),
    ):
        act()
        assert (await watch.read()).status == expected
        assert await statuses() == {expected}
    watch.cancel()


async def test_many_probes_do_not_pile_up(engine: FakeEngine, channel: grpc.aio.Channel) -> None:
    """Behaviour 60: a probe is answered by the front alone, also when the engine says nothing any more."""
    engine.become_ready()
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(60):
        await asyncio.gather(*(health.Check(health_pb2.HealthCheckRequest()) for _ in range(200)))
    assert engine.heard == []


async def test_reflection_describes_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for response in call:
        names = {service.name for service in response.list_services_response.service}
        break
    call.cancel()
    assert {*SERVICES, "grpc.health.v1.Health"} <= names


async def test_flush_is_the_engines(engine: FakeEngine, stub: worker_pb2_grpc.WorkerStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.FlushCache(worker_pb2.FlushCacheRequest())
    assert isinstance(error_from_rpc(failure.value), Unavailable)
    engine.become_ready()
    flushed = await stub.FlushCache(worker_pb2.FlushCacheRequest())
    assert (flushed.flushed_tokens, flushed.kept_tokens) == (64, 16)


async def test_drain_lets_requests_finish() -> None:
    """Behaviour 54: no new requests; the running one finishes; Drain returns when none is left."""
    async with sim_worker(sim_runner(verify=False)) as worker, open_channel(worker.address) as channel:
        stub, workers = inference_pb2_grpc.InferenceStub(channel), worker_pb2_grpc.WorkerStub(channel)
        running = stub.Generate(request("x", max_new_tokens=2000, ignore_eos=True))
        await running.initial_metadata()
        draining = asyncio.ensure_future(workers.Drain(worker_pb2.DrainRequest(grace_s=30)))
        await worker.feed.status_after(WorkerStatus.SERVING)
        assert worker.feed.status is WorkerStatus.DRAINING
        kinds, error = await read_failure(stub.Generate(request("y")))
        assert kinds == []
        assert isinstance(error, Unavailable)
        assert "draining" in str(error)
        assert len((await collect(running)).token_ids) == 2000
        drained = await draining
        assert (drained.finished_requests, drained.aborted_requests) == (1, 0)


async def test_drain_aborts_what_outlasts_the_grace() -> None:
    """Behaviour 54: the client gets what there is, and Finished{ABORT}."""
    async with sim_worker(sim_runner(verify=False)) as worker, open_channel(worker.address) as channel:
        stub, workers = inference_pb2_grpc.InferenceStub(channel), worker_pb2_grpc.WorkerStub(channel)
        calls = [asyncio.create_task(generate(stub, f"x{i}", **ENDLESS)) for i in range(3)]
        await until(lambda: len(worker.requests) == 3)
        drained = await workers.Drain(worker_pb2.DrainRequest(grace_s=0.05))
        assert (drained.finished_requests, drained.aborted_requests) == (0, 3)
        assert [answer.reason for answer in await asyncio.gather(*calls)] == ["ABORT"] * 3
        again = await workers.Drain(worker_pb2.DrainRequest())
        assert (again.finished_requests, again.aborted_requests) == (0, 0)


@pytest.mark.parametrize("grace_s", [-1.0, math.nan, math.inf])
async def test_a_grace_that_is_none_is_refused(stub: worker_pb2_grpc.WorkerStub, grace_s: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.Drain(worker_pb2.DrainRequest(grace_s=grace_s))
    error = error_from_rpc(failure.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "grace_s"

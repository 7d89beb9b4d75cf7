"""WatchState tells several routers of prompts that are accepted and not computed, until their requests have ended."""

from __future__ import annotations

import asyncio

import grpc.aio
import numpy as np
import pytest

from radixfleet import blocks
from radixfleet.types import FinishReason
from radixfleet.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.answers import collect, read_failure, request
from tests.support.fake_engine import FakeEngine
from tests.support.state_reader import Reader
from tests.support.waiting import until
from worker.app import Worker

PROMPT = list(range(200))
MANY = 30.0


def hashes(tokens: list[int]) -> set[int]:
    seed = blocks.seed_hash(blocks.namespace("sim-model"))
    return set(blocks.chain_hashes(seed, np.array(tokens, dtype=np.uint32)).tolist())


@pytest.fixture
def worker(worker: Worker, engine: FakeEngine) -> Worker:
    engine.become_ready()
    return worker


@pytest.fixture
async def reader(channel: grpc.aio.Channel) -> Reader:
    """One of two routers that watch the worker."""
    watchers = [Reader(channel), Reader(channel)]
    for watcher in watchers:
        await watcher.next()
    return watchers[0]


async def stops_coming(engine: FakeEngine, reader: Reader) -> None:
    """With the next report of the engine."""
    async with asyncio.timeout(MANY):
        while reader.coming:
            engine.report()
            await reader.next()


async def submitted(engine: FakeEngine, count: int = 1) -> int:
    """Wait until the engine has so many requests; the number of the last."""
    await until(lambda: len(engine.submits) == count)
    return engine.submits[-1].uid


async def test_another_router_hears_of_a_prompt_before_it_is_computed(
    engine: FakeEngine, channel: grpc.aio.Channel, reader: Reader
) -> None:
    """Behaviour 51. It is told once; and when it is cached, no more."""
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT))
    uid = await submitted(engine)
    await reader.until(lambda _: reader.coming == hashes(PROMPT))
    engine.report(added=hashes(PROMPT))
    await reader.until(lambda _: reader.blocks == hashes(PROMPT))
    assert reader.coming == set()
    engine.admit(uid)
    engine.output(uid, 1)
    engine.end(uid, FinishReason.LENGTH)
    await collect(call)
    late = Reader(channel)
    await late.next()
    assert (late.blocks, late.coming) == (hashes(PROMPT), set())


async def test_who_watches_late_is_told_all_that_is_coming(
    engine: FakeEngine, channel: grpc.aio.Channel, reader: Reader
) -> None:
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT))
    await reader.until(lambda _: reader.coming == hashes(PROMPT))
    late = Reader(channel)
    await late.next()
    assert late.coming == hashes(PROMPT)
    call.cancel()
    await late.until(lambda _: bool(engine.aborted_uids))
    await stops_coming(engine, late)


async def test_a_router_that_connects_later_is_told_what_was_accepted_before(
    engine: FakeEngine, channel: grpc.aio.Channel
) -> None:
    """With its digest, though nobody was told while a single router watched; and that one hears of it too."""
    sole = Reader(channel)
    await sole.next()
    stub = inference_pb2_grpc.InferenceStub(channel)
    ended = stub.Generate(request([9] * 64, lease_id="over"))
    engine.end(await submitted(engine), FinishReason.LENGTH)
    await collect(ended)
    await sole.until(lambda _: ("over", "ENDED") in sole.leases)
    call = stub.Generate(request(PROMPT))
    await submitted(engine, 2)
    assert sole.coming == set()
    late = Reader(channel)
    await late.next()
    assert late.coming == hashes(PROMPT), "what runs, and not what has ended"
    await sole.until(lambda _: sole.coming == hashes(PROMPT))
    call.cancel()
    await until(lambda: bool(engine.aborted_uids))
    await stops_coming(engine, late)
    await sole.until(lambda _: not sole.coming)


async def test_a_router_that_starts_again_is_told_what_was_accepted_without_it(
    engine: FakeEngine, channel: grpc.aio.Channel
) -> None:
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT))
    await submitted(engine)
    reader = Reader(channel)
    await reader.next()
    assert reader.coming == hashes(PROMPT)
    call.cancel()
    await until(lambda: bool(engine.aborted_uids))
    await stops_coming(engine, reader)


async def test_a_single_router_is_told_nothing(engine: FakeEngine, channel: grpc.aio.Channel) -> None:
    """It has sent the prompts itself."""
    reader = Reader(channel)
    await reader.next()
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT, lease_id="heard"))
    uid = await submitted(engine)
    engine.admit(uid)
    await reader.until(lambda _: ("heard", "STARTED") in reader.leases)
    assert reader.coming == set()
    call.cancel()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_cancelled_request_is_coming_no_more(
    engine: FakeEngine, channel: grpc.aio.Channel, reader: Reader, n: int
) -> None:
    """With any number of completions, for they share the prompt."""
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT, n=n))
    await reader.until(lambda _: reader.coming == hashes(PROMPT))
    call.cancel()
    await until(lambda: len(engine.aborted_uids) == n)
    await stops_coming(engine, reader)


async def test_an_aborted_request_is_coming_no_more(
    worker: Worker, engine: FakeEngine, channel: grpc.aio.Channel, reader: Reader
) -> None:
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT))
    await reader.until(lambda _: reader.coming == hashes(PROMPT))
    metadata = dict(await call.initial_metadata())
    execution_id = metadata["radixfleet-execution-id"]
    await worker_pb2_grpc.WorkerStub(channel).Abort(worker_pb2.AbortRequest(execution_id=execution_id))
    assert (await collect(call)).reason == "ABORT"
    await stops_coming(engine, reader)


async def test_a_failed_request_is_coming_no_more_and_others_still_are(
    engine: FakeEngine, channel: grpc.aio.Channel, reader: Reader
) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    failing = stub.Generate(request(PROMPT))
    first = await submitted(engine)
    other = PROMPT[:128] + [7] * 64
    staying = stub.Generate(request(other))
    await submitted(engine, 2)
    await reader.until(lambda _: reader.coming == hashes(PROMPT) | hashes(other))
    engine.end(first, None, code="INTERNAL", message="a step failed")
    await read_failure(failing)
    async with asyncio.timeout(MANY):
        while reader.coming != hashes(other):
            engine.report()
            await reader.next()
    staying.cancel()
    await until(lambda: bool(engine.aborted_uids))
    await stops_coming(engine, reader)


async def test_a_refused_request_never_comes(engine: FakeEngine, channel: grpc.aio.Channel, reader: Reader) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    await read_failure(stub.Generate(request(PROMPT, max_new_tokens=10**6)))
    call = stub.Generate(request([9] * 64, lease_id="next"))
    await reader.until(lambda _: bool(reader.coming))
    assert reader.coming == hashes([9] * 64)
    call.cancel()


async def test_a_new_engine_has_nothing_coming(engine: FakeEngine, channel: grpc.aio.Channel, reader: Reader) -> None:
    """The end of what the old one had counts nowhere."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(request(PROMPT))
    await reader.until(lambda _: reader.coming == hashes(PROMPT))
    old = reader.incarnation
    engine.crash()
    await reader.until(lambda update: update.incarnation != old)
    assert reader.coming == set()
    await read_failure(call)
    engine.restart()
    engine.become_ready()
    again = stub.Generate(request(PROMPT))
    await reader.until(lambda _: reader.coming == hashes(PROMPT))
    again.cancel()
    await until(lambda: bool(engine.aborted_uids))
    await stops_coming(engine, reader)

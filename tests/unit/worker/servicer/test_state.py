"""WatchState: digests, numbered deltas, heartbeats, lease events, restarts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack
from weakref import ref

import grpc.aio
import numpy as np

from radixfleet import blocks
from radixfleet.channel import open_channel
from radixfleet.types import FinishReason, Load, WorkerStatus
from radixfleet.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.answers import collect, generate, request
from tests.support.fake_engine import READY, FakeEngine
from tests.support.state_reader import Reader, Update, unpack
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.app import Worker
from worker.metrics import BuildInfo, WorkerMetrics
from worker.servicer.state import StateFeed


def has_status(status: worker_pb2.WorkerStatus.ValueType) -> Callable[[Update], bool]:
    return lambda update: update.status == status


async def test_a_watcher_gets_a_digest_at_once_then_deltas(engine: FakeEngine, channel: grpc.aio.Channel) -> None:
    """Behaviour 50: a watcher that joins late gets everything, and nothing twice."""
    engine.become_ready()
    engine.report(added=[1, 2, 3])
    early = Reader(channel)
    await early.until(lambda _: early.blocks == {1, 2, 3})
    engine.report(Load(running_requests=2, waiting_requests=1), evicted=[2], added=[4])
    update = await early.until(lambda _: early.blocks == {1, 3, 4})
    assert (update.load.running_requests, update.load.waiting_requests) == (2, 1)
    assert update.capacity.kv_tokens == READY.capacity.kv_tokens
    late = Reader(channel)
    first = await late.next()
    assert unpack(first.digest.block_hashes) == [1, 3, 4]
    assert first.sequence == early.sequence
    engine.report(evicted=[1], added=[5])
    for reader in (early, late):
        await reader.until(lambda _, reader=reader: reader.blocks == {3, 4, 5})
        assert reader.digests == 1


async def test_advice_travels_while_it_holds(engine: FakeEngine, channel: grpc.aio.Channel) -> None:
    engine.become_ready()
    engine.report(advice={"prefill": "smaller chunks", "kv_full": "fewer requests"})
    reader = Reader(channel)
    await reader.until(lambda update: list(update.advice) == ["smaller chunks", "fewer requests"])
    engine.report()
    await reader.until(lambda update: not update.advice)


async def test_a_silent_worker_still_has_a_heartbeat(engine: FakeEngine, channel: grpc.aio.Channel) -> None:
    engine.become_ready()
    reader = Reader(channel)
    async with asyncio.timeout(60):
        for _ in range(3):
            update = await reader.next()
    assert update.WhichOneof("prefix") is None


async def test_the_stream_begins_while_the_engine_loads(engine: FakeEngine, channel: grpc.aio.Channel) -> None:
    reader = Reader(channel)
    first = await reader.next()
    assert first.status == worker_pb2.WORKER_STATUS_LOADING
    assert not first.HasField("capacity")
    engine.become_ready()
    serving = await reader.until(has_status(worker_pb2.WORKER_STATUS_SERVING))
    assert serving.capacity.kv_tokens == READY.capacity.kv_tokens


async def test_a_new_incarnation_wipes_what_was_cached(engine: FakeEngine, channel: grpc.aio.Channel) -> None:
    """Behaviour 50: the first word after the engine died has the new incarnation and an empty digest."""
    engine.become_ready()
    engine.report(Load(running_requests=1), added=[1, 2])
    reader = Reader(channel)
    await reader.until(lambda _: reader.blocks == {1, 2})
    old = reader.incarnation
    engine.crash()
    failed = await reader.until(lambda update: update.incarnation != old)
    assert failed.status == worker_pb2.WORKER_STATUS_FAILED
    assert (reader.blocks, reader.sequence, reader.digests) == (set(), 0, 2)
    assert failed.load.running_requests == 0
    engine.restart()
    engine.become_ready()
    engine.report(added=[9])
    await reader.until(has_status(worker_pb2.WORKER_STATUS_SERVING))
    await reader.until(lambda _: reader.blocks == {9})


async def test_the_router_learns_what_became_of_its_leases(engine: FakeEngine, channel: grpc.aio.Channel) -> None:
    engine.become_ready()
    reader = Reader(channel)
    await reader.next()
    stub = inference_pb2_grpc.InferenceStub(channel)
    finished = stub.Generate(request("x", lease_id="finished"))
    await until(lambda: len(engine.submits) == 1)
    unbooked = stub.Generate(request("x"))
    cancelled = stub.Generate(request("x", lease_id="cancelled"))
    await until(lambda: len(engine.submits) == 3)
    uid = engine.submits[0].uid
    engine.admit(uid, cached_tokens=64)
    engine.output(uid, 1)
    engine.end(uid, FinishReason.LENGTH)
    await collect(finished)
    await cancelled.initial_metadata()
    cancelled.cancel()
    unbooked.cancel()
    await reader.until(lambda _: len(reader.leases) == 4)
    assert sorted(reader.leases) == [
        ("cancelled", "ENDED"),
        ("finished", "ENDED"),
        ("finished", "FIRST_TOKEN"),
        ("finished", "STARTED"),
    ]


async def test_reported_blocks_are_those_that_the_router_would_compute() -> None:
    """The real scheduler and cache: prompt and answer appear under the hashes of `radixfleet.blocks`."""
    async with sim_worker() as worker, open_channel(worker.address) as channel:
        reader = Reader(channel)
        await reader.next()
        prompt = list(range(200))
        answer = await generate(inference_pb2_grpc.InferenceStub(channel), prompt, max_new_tokens=100, ignore_eos=True)
        cached = np.array([*prompt, *answer.token_ids][:-1], dtype=np.uint32)
        expected = blocks.chain_hashes(blocks.seed_hash(blocks.namespace("sim-model")), cached)
        await reader.until(lambda _: reader.blocks == set(expected.tolist()))
        await worker_pb2_grpc.WorkerStub(channel).FlushCache(worker_pb2.FlushCacheRequest())
        await reader.until(lambda _: reader.blocks == set())
        reader.call.cancel()


async def test_a_watcher_that_falls_behind_gets_a_digest(engine: FakeEngine) -> None:
    """Its unread updates are bounded; what became of leased requests is not lost with them."""
    metrics = WorkerMetrics(BuildInfo("0", "w", "m", "sim"))
    async with StateFeed(engine, metrics, update_s=0.001) as feed:
        engine.become_ready()
        with feed.watch() as slow, feed.watch() as quick:
            feed.lease_event(worker_pb2.LeaseEvent(lease_id="kept", phase=worker_pb2.LeaseEvent.PHASE_ENDED))
            read = 0
            for block in range(200):
                engine.report(added=[block])
                seen = await anext(quick)
                while block not in unpack(seen.delta.added):
                    seen = await anext(quick)
                    read += 1
            updates = [await anext(slow)]
            while updates[-1].sequence < seen.sequence:
                updates.append(await anext(slow))
    assert len(updates) <= 65
    assert updates[0].WhichOneof("prefix") == "digest"
    assert len(unpack(updates[0].digest.block_hashes)) > 100
    assert [event.lease_id for event in updates[0].lease_events] == ["kept"]
    for before, after in itertools.pairwise(updates):
        assert after.sequence == before.sequence + after.HasField("delta")


async def test_a_change_of_status_does_not_wait_for_the_next_update(engine: FakeEngine) -> None:
    metrics = WorkerMetrics(BuildInfo("0", "w", "m", "sim"))
    async with StateFeed(engine, metrics, update_s=60, heartbeat_s=60) as feed, asyncio.timeout(60):
        with feed.watch() as watcher:
            seen = [(await anext(watcher)).status]
            for act in (engine.become_ready, feed.drain, engine.crash):
                act()
                seen.append((await anext(watcher)).status)
    assert [worker_pb2.WorkerStatus.Name(status).removeprefix("WORKER_STATUS_") for status in seen] == [
        "LOADING",
        "SERVING",
        "DRAINING",
        "FAILED",
    ]


async def test_what_the_engine_before_has_reported_is_no_report_of_the_one_started_again(engine: FakeEngine) -> None:
    metrics = WorkerMetrics(BuildInfo("0", "w", "m", "sim"))
    async with StateFeed(engine, metrics, update_s=60, heartbeat_s=60) as feed, asyncio.timeout(60):
        with feed.watch() as watcher:
            for act in (engine.become_ready, engine.report, engine.crash, engine.restart):
                act()
            assert (await anext(watcher)).WhichOneof("prefix") == "digest"
            assert (await anext(watcher)).between_reports


async def test_a_watcher_whose_stream_has_ended_is_forgotten(engine: FakeEngine) -> None:
    metrics = WorkerMetrics(BuildInfo("0", "w", "m", "sim"))
    async with StateFeed(engine, metrics) as feed:
        with feed.watch() as watcher:
            kept = ref(watcher)
        del watcher
        assert kept() is None


async def test_state_streams_end_when_the_worker_stops(engine: FakeEngine) -> None:
    async with AsyncExitStack() as client:
        async with sim_worker(engine=engine, serving=False) as worker:
            engine.become_ready()
            reader = Reader(await client.enter_async_context(open_channel(worker.address)))
            await reader.next()
            watcher = asyncio.create_task(_read_to_the_end(reader))
        assert await watcher is grpc.StatusCode.OK


async def _read_to_the_end(reader: Reader) -> grpc.StatusCode:
    while await reader.call.read() is not grpc.aio.EOF:
        pass
    return await reader.call.code()


async def test_waiting_for_another_status(engine: FakeEngine, worker: Worker) -> None:
    waiting = asyncio.create_task(worker.feed.status_after(WorkerStatus.LOADING))
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.become_ready()
    assert await waiting is WorkerStatus.SERVING
    worker.feed.drain()
    assert worker.feed.status is WorkerStatus.DRAINING
    assert worker.feed.trouble == ""
    engine.crash()
    assert worker.feed.status is WorkerStatus.FAILED
    assert worker.feed.trouble == "killed", "for the status of fleets on Ray"
    engine.restart()
    assert worker.feed.trouble == ""
    assert worker.feed.status is WorkerStatus.DRAINING, "a drained worker does not come back"

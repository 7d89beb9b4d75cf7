"""SubscribeKvEvents: a follower's copy equals the cache, through snapshots, changes, resumption and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import grpc.aio
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, namespace, seed_hash
from radixfleet.channel import open_channel
from radixfleet.types import Load
from radixfleet.v1 import inference_pb2_grpc
from tests.support.answers import generate
from tests.support.fake_engine import FakeEngine
from tests.support.kv_follower import KvFollower
from tests.support.waiting import until
from tests.support.worker_fixture import sim_runner, sim_worker
from worker.app import Worker
from worker.core.messages import BlockRun, FollowBlocks, Report
from worker.dialects import kv_events
from worker.dialects.kv_events import MAX_UNREAD, KvEventFeed, OutOfRange

SEED = int(seed_hash(namespace("sim-model")))


def prompt(first: int, blocks: int = 1) -> list[int]:
    """Whole blocks, and a token that is always computed."""
    return [(first + position // BLOCK_TOKENS) % 256 for position in range(blocks * BLOCK_TOKENS)] + [7]


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with (
        sim_worker(sim_runner(kv_tokens=1024, max_context_tokens=512)) as worker,
        open_channel(worker.address) as opened,
    ):
        yield opened


def stub_of(channel: grpc.aio.Channel) -> sglang_scheduler_pb2_grpc.SglangSchedulerStub:
    return sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)


async def run(channel: grpc.aio.Channel, token_ids: list[int], **fields: object) -> None:
    await generate(inference_pb2_grpc.InferenceStub(channel), token_ids, max_new_tokens=1, **fields)


async def test_a_late_follower_gets_a_snapshot_and_then_what_changes(channel: grpc.aio.Channel) -> None:
    await run(channel, prompt(0, 2))
    await run(channel, prompt(0, 2)[:64] + prompt(9))
    follower = KvFollower(stub_of(channel))
    await follower.read()
    assert follower.snapshots == 1
    first = tuple(prompt(0)[:64])
    assert follower.cached == {first, tuple(prompt(0, 2)[:128]), first + tuple(prompt(9)[:64])}
    await run(channel, prompt(20, 3))
    await follower.read_until(lambda it: tuple(prompt(20, 3)[:192]) in it.cached)
    assert len(follower.cached) == 6
    follower.call.cancel()


async def test_what_is_evicted_or_flushed_is_removed(channel: grpc.aio.Channel) -> None:
    follower = KvFollower(stub_of(channel))
    for first in range(0, 40, 4):
        await run(channel, prompt(first, 4))
    await follower.read_until(lambda it: tuple(prompt(36, 4)[:256]) in it.cached)
    assert tuple(prompt(0)[:64]) not in follower.cached
    assert len(follower.cached) * BLOCK_TOKENS <= 1024
    flushed = await stub_of(channel).FlushCache(common_pb2.FlushCacheRequest())
    assert flushed.success
    await follower.read_until(lambda it: not it.cached)
    assert (follower.snapshots, follower.cleared) == (1, 1)
    follower.call.cancel()


async def test_salted_prefixes_say_so(channel: grpc.aio.Channel) -> None:
    await run(channel, prompt(0), cache_salt="tenant")
    follower = KvFollower(stub_of(channel))
    await follower.read()
    assert list(follower.salts.values()) == ["tenant"]
    follower.call.cancel()


async def test_a_follower_goes_on_where_it_was(channel: grpc.aio.Channel) -> None:
    steady, broken = KvFollower(stub_of(channel)), KvFollower(stub_of(channel))
    await run(channel, prompt(0))
    await broken.read_until(lambda it: it.cached)
    broken.call.cancel()
    await run(channel, prompt(1))
    await steady.read_until(lambda it: len(it.cached) == 2)
    assert broken.cursor is not None
    resumed = KvFollower(stub_of(channel), start=broken.cursor + 1)
    resumed.prefixes = broken.prefixes
    await resumed.read_until(lambda it: len(it.cached) == 2)
    assert resumed.snapshots == 0
    assert resumed.prefixes == steady.prefixes
    for follower in (steady, resumed):
        follower.call.cancel()


@pytest.mark.parametrize("start", [1, 2**63])
async def test_a_number_that_is_not_remembered_is_out_of_range(channel: grpc.aio.Channel, start: int) -> None:
    steady = KvFollower(stub_of(channel))
    await steady.read()
    lost = KvFollower(stub_of(channel), start=start)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lost.call.read()
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    steady.call.cancel()


async def test_load_records_come_with_and_without_events(channel: grpc.aio.Channel) -> None:
    follower = KvFollower(stub_of(channel))
    await follower.read()
    await run(channel, prompt(0))
    # When nothing runs any more, all that is cached could be evicted.
    await follower.read_until(
        lambda it: it.loads[-1].load_only and it.loads[-1].token_usage > 0 and not it.loads[-1].active_token_usage
    )
    load = follower.loads[-1]
    assert (load.num_used_tokens, load.max_total_num_tokens) == (64, 1024)
    assert (load.running_requests, load.waiting_requests, load.max_running_requests) == (0, 0, 32)
    follower.call.cancel()


async def test_an_idle_worker_is_heard_of(channel: grpc.aio.Channel) -> None:
    follower = KvFollower(stub_of(channel))
    await follower.read()
    heard = len(follower.loads)
    await follower.read_until(lambda it: len(it.loads) >= heard + 2)
    follower.call.cancel()


class FakeWorker:
    """A worker whose engine the test plays."""

    def __init__(self, worker: Worker, engine: FakeEngine, channel: grpc.aio.Channel) -> None:
        self.worker, self.engine, self.channel = worker, engine, channel
        self.blocks: list[int] = []

    def cache(self, *first_ids: int, everything: bool = False) -> None:
        """A report of so many prefixes of one block each."""
        token_ids = [np.full(BLOCK_TOKENS, first, np.int32) for first in first_ids]
        runs = [
            BlockRun(namespace("sim-model"), 0, SEED, chain_hashes(seed_hash(namespace("sim-model")), ids), ids)
            for ids in token_ids
        ]
        hashes = np.array([run.hashes[0] for run in runs], np.uint64)
        self.engine._hear(
            Report(Load(), np.empty(0, np.uint64), hashes, {}, 0.0, [], [], block_runs=runs, has_all_blocks=everything)
        )


@pytest.fixture
async def played() -> AsyncIterator[FakeWorker]:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        yield FakeWorker(worker, engine, channel)


def follows(engine: FakeEngine) -> list[bool]:
    return [message.on for message in engine.heard if isinstance(message, FollowBlocks)]


async def test_the_call_is_answered_at_once_and_served_when_the_model_has_loaded(played: FakeWorker) -> None:
    follower = KvFollower(stub_of(played.channel))
    await follower.call.initial_metadata()
    assert follows(played.engine) == []
    played.engine.become_ready()
    await until(lambda: follows(played.engine) == [True])
    played.cache(3)  # a report from before the engine knew: nothing is certain yet
    played.cache(1, 2, everything=True)
    await follower.read()
    assert follower.cached == {(1,) * 64, (2,) * 64}
    follower.call.cancel()


async def test_a_restart_of_the_engine_clears_and_goes_on(played: FakeWorker) -> None:
    """Behaviour 50: a restarted worker's old entries are dropped at once."""
    played.engine.become_ready()
    follower = KvFollower(stub_of(played.channel))
    await until(lambda: follows(played.engine) == [True])
    played.cache(1, everything=True)
    await follower.read_until(lambda it: it.cached)
    played.engine.crash()
    await follower.read_until(lambda it: it.cleared == 2)
    assert not follower.cached
    played.engine.restart()
    played.engine.become_ready()
    assert follows(played.engine) == [True, True]
    played.cache(5, everything=True)
    await follower.read_until(lambda it: it.cached)
    assert (follower.cached, follower.snapshots) == ({(5,) * 64}, 1)
    follower.call.cancel()


async def test_a_slow_follower_gets_a_snapshot_instead_of_what_it_missed(played: FakeWorker) -> None:
    played.engine.become_ready()
    async with KvEventFeed(played.engine) as feed:
        with feed.subscribe(0) as subscription:
            played.cache(0, everything=True)
            for first in range(1, 101):
                played.cache(first)
            cached: set[int] = set()
            num_batches = 0
            while len(cached) < 101:
                batch = await anext(subscription)
                num_batches += 1
                for event in batch.events:
                    if event.WhichOneof("data") == "cleared":
                        cached.clear()
                    cached.update(block.block_hash for block in event.stored.blocks)
            assert num_batches < 101


async def test_a_large_snapshot_is_not_begun_anew_while_it_is_read(
    played: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who reads more slowly than the cache changes would never have all of it."""
    monkeypatch.setattr(kv_events, "SNAPSHOT_BLOCKS", 1)
    played.engine.become_ready()
    async with KvEventFeed(played.engine) as feed:
        with feed.subscribe(0) as subscription:
            played.cache(*range(2 * MAX_UNREAD), everything=True)
            for index in range(2 * MAX_UNREAD):
                batch = await anext(subscription)
                assert (batch.snapshot.index, batch.snapshot.count) == (index, 2 * MAX_UNREAD)
                played.cache(1000 + index)
            assert not (await anext(subscription)).HasField("snapshot")


async def test_a_snapshot_is_made_as_it_is_read(played: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a large cache takes the event loop a tenth of a second, which every stream would wait."""
    monkeypatch.setattr(kv_events, "SNAPSHOT_BLOCKS", 10)
    made: list[int] = []
    stored = kv_events._stored
    monkeypatch.setattr(kv_events, "_stored", lambda blocks: made.append(len(blocks)) or stored(blocks))
    played.engine.become_ready()
    async with KvEventFeed(played.engine) as feed:
        with feed.subscribe(0) as subscription:
            played.cache(*range(25), everything=True)
            for num_made in range(1, 4):
                assert len((await anext(subscription)).events) > 0
                assert len(made) == num_made
    assert made == [10, 10, 5]


async def test_nobody_goes_on_from_before_a_time_that_nobody_followed(played: FakeWorker) -> None:
    """What was evicted meanwhile was told to nobody."""
    played.engine.become_ready()
    async with KvEventFeed(played.engine, linger_s=0.0) as feed:
        with feed.subscribe(0) as subscription:
            played.cache(0, everything=True)
            last = (await anext(subscription)).sequence_number
        await until(lambda: follows(played.engine) == [True, False])
        with feed.subscribe(0) as subscription:
            played.cache(1, everything=True)
            assert (await anext(subscription)).sequence_number > last
            with pytest.raises(OutOfRange), feed.subscribe(last + 1):
                pass


async def test_nobody_goes_on_from_within_a_snapshot(played: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live batches have the numbers of its chunks; with them, who broke off would lack the other chunks."""
    monkeypatch.setattr(kv_events, "SNAPSHOT_BLOCKS", 2)
    played.engine.become_ready()
    async with KvEventFeed(played.engine) as feed:
        with feed.subscribe(0) as steady:
            played.cache(0, everything=True)
            for first in range(1, 10):
                played.cache(first)
            with feed.subscribe(0) as broken:
                chunks = [await anext(broken) for _ in range(5)]
            assert [chunk.snapshot.count for chunk in chunks] == [5] * 5
            for chunk in chunks[:-1]:
                with pytest.raises(OutOfRange), feed.subscribe(chunk.sequence_number + 1):
                    pass
            played.cache(10)
            with feed.subscribe(chunks[-1].sequence_number + 1) as resumed:
                live = await anext(resumed)
            numbers = [(await anext(steady)).sequence_number]
            while numbers[-1] < live.sequence_number:
                numbers.append((await anext(steady)).sequence_number)
    assert all(after - before in (0, 1) for before, after in pairwise(numbers)), "others see no gap"


async def test_who_goes_on_reads_all_that_is_remembered(played: FakeWorker) -> None:
    played.engine.become_ready()
    async with KvEventFeed(played.engine) as feed:
        with feed.subscribe(0) as steady:
            played.cache(0, everything=True)
            start = (await anext(steady)).sequence_number + 1
            for first in range(1, 2 * MAX_UNREAD):
                played.cache(first)
            with feed.subscribe(start) as resumed:
                played.cache(1000)
                read = [await anext(resumed) for _ in range(2 * MAX_UNREAD)]
    assert [batch.sequence_number for batch in read] == list(range(start, start + 2 * MAX_UNREAD))
    assert not any(batch.HasField("snapshot") for batch in read)


async def test_the_engine_tells_tokens_only_while_somebody_follows(played: FakeWorker) -> None:
    played.engine.become_ready()
    async with KvEventFeed(played.engine, linger_s=0.0) as feed:
        with feed.subscribe(0):
            assert follows(played.engine) == [True]
            with feed.subscribe(0):
                pass
        await asyncio.sleep(0)
        await until(lambda: follows(played.engine) == [True, False])
        with pytest.raises(OutOfRange), feed.subscribe(5):
            pass

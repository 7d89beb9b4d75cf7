"""`Fleet.WatchFleet` over real gRPC: a snapshot, what is different after it, and how the stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc.aio
import pytest

from radixfleet.answers import FleetReport, WorkerEntry
from radixfleet.channel import open_channel
from radixfleet.errors import Unavailable
from radixfleet.types import WorkerStatus
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2
from router.app import drain
from tests.support.router_fixture import Fleet, fake_worker, running_fleet

LONG_S = 60.0
"""Nothing takes so long; a test that waits longer has failed."""


@asynccontextmanager
async def watching(fleet: Fleet) -> AsyncIterator[AsyncIterator[FleetReport]]:
    async with aclosing(fleet.client.watch_fleet(timeout_s=LONG_S)) as reports:
        yield reports


async def until(reports: AsyncIterator[FleetReport], is_so: Callable[[dict[str, WorkerEntry]], bool]) -> FleetReport:
    """The first report of whose workers, by id, this is true."""
    async for report in reports:
        if is_so({worker.worker_id: worker for worker in report.workers}):
            return report
    raise AssertionError("the stream ended without an error")


@asynccontextmanager
async def raw_updates(fleet: Fleet) -> AsyncIterator[grpc.aio.UnaryStreamCall[object, fleet_pb2.FleetUpdate]]:
    async with open_channel(fleet.router.address) as channel:
        call = fleet_pb2_grpc.FleetStub(channel).WatchFleet(fleet_pb2.WatchFleetRequest(), timeout=LONG_S)
        yield call
        call.cancel()


async def test_the_first_word_is_what_list_workers_says() -> None:
    async with running_fleet(2) as fleet, watching(fleet) as reports:
        first = await anext(reports)
        listed = await fleet.client.list_workers()
        assert [worker.address for worker in first.workers] == [worker.address for worker in listed]
        assert [worker.info for worker in first.workers] == [worker.info for worker in listed]
        assert first.fleet.policy == "min_cost"


async def test_workers_that_come_change_and_go_are_told() -> None:
    late = fake_worker("w9")
    async with running_fleet(1) as fleet, watching(fleet) as reports:
        try:
            assert [worker.worker_id for worker in (await anext(reports)).workers] == ["w0"]
            await late.start()
            await fleet.client.register(late.address)
            both = await until(reports, lambda workers: "w9" in workers and not workers["w9"].ineligible_reason)
            assert [worker.worker_id for worker in both.workers] == ["w0", "w9"]
            late.status = WorkerStatus.DRAINING
            late.publish()
            await until(reports, lambda workers: workers["w9"].status is WorkerStatus.DRAINING)
            await late.kill()
            await until(reports, lambda workers: not workers["w9"].connected)
            await fleet.client.remove("w9")
            assert len((await until(reports, lambda workers: "w9" not in workers)).workers) == 1
        finally:
            await late.kill()


async def test_updates_hold_only_what_is_different() -> None:
    async with running_fleet(3) as fleet, raw_updates(fleet) as call:
        snapshot = await call.read()
        assert snapshot.snapshot
        assert len(snapshot.workers) == 3
        fleet.workers[1].status = WorkerStatus.DRAINING
        fleet.workers[1].publish()
        told: list[str] = []
        while "w1" not in told:
            update = await call.read()
            assert not update.snapshot
            assert not update.removed
            told += [worker.worker_id for worker in update.workers]
        assert set(told) == {"w1"}


async def test_a_reader_that_is_behind_gets_all_that_it_missed_in_one_message() -> None:
    """Nothing queues up for it: of what became different and is again as it was told it never hears."""
    async with running_fleet(3) as fleet:
        updates = fleet.router.watch.updates()
        assert (await anext(updates)).snapshot
        for status in (WorkerStatus.DRAINING, WorkerStatus.SERVING, WorkerStatus.DRAINING):
            for worker in fleet.workers[:2]:
                worker.status = status
                worker.publish()
            await until_others_hear(fleet, {"w0": status, "w1": status})
        fleet.workers[0].status = WorkerStatus.SERVING
        fleet.workers[0].publish()
        await until_others_hear(fleet, {"w0": WorkerStatus.SERVING})
        missed = await anext(updates)
        assert [worker.worker_id for worker in missed.workers] == ["w1"]
        assert missed.workers[0].info.status == worker_pb2.WORKER_STATUS_DRAINING
        await updates.aclose()


async def until_others_hear(fleet: Fleet, statuses: dict[str, WorkerStatus]) -> None:
    """Looks are shared: others make them while a reader is behind."""
    async with watching(fleet) as others:
        await until(others, lambda workers: all(workers[name].status is status for name, status in statuses.items()))


async def test_a_fleet_in_which_nothing_happens_is_told_of_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the heartbeat comes, which has no workers in it."""
    monkeypatch.setattr("router.api.fleet_watch.LOOK_S", 0.02)
    monkeypatch.setattr("router.api.fleet_watch.HEARTBEAT_S", 0.4)
    async with running_fleet(2) as fleet, raw_updates(fleet) as call:
        uptimes_s = [(await call.read()).fleet.uptime_s]
        for _ in range(3):
            update = await call.read()
            assert not update.workers
            uptimes_s.append(update.fleet.uptime_s)
        assert uptimes_s[-1] - uptimes_s[0] >= 0.6  # half of it: they are read a moment before


async def test_a_router_that_stops_says_so() -> None:
    async with running_fleet(1) as fleet, watching(fleet) as reports:
        await anext(reports)
        stopping = asyncio.create_task(drain(fleet.router, 60.0))
        with pytest.raises(Unavailable, match="the router stops"):
            await until(reports, lambda _: False)
        await stopping

"""What a worker in an actor takes of its node, and what it tells its supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from radixfleet.channel import open_channel
from radixfleet.types import WorkerStatus
from radixfleet.v1 import worker_pb2, worker_pb2_grpc
from tests.support.fake_engine import FakeEngine
from tests.support.registering_router import RegisteringRouter
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.app import Worker
from worker.ray_actor import WorkerActor, node_share

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("THREADS", "DEVICE_MEMORY"):
        monkeypatch.delenv(f"RADIXFLEET_WORKER_{name}", raising=False)


def test_workers_without_gpus_share_cores_and_half_of_the_memory_of_their_node():
    node = {"CPU": 8.0, "memory": 16.0 * GIB, "worker_slot": 4.0}
    assert node_share(node, 1.0) == {"threads": 2, "device_memory": 2 * GIB}
    assert node_share(node, 2.0) == {"threads": 4, "device_memory": 4 * GIB}


def test_more_slots_than_cores_still_gives_each_a_thread():
    assert node_share({"CPU": 2.0, "worker_slot": 4.0}, 1.0) == {"threads": 1}


def test_a_worker_with_a_gpu_shares_nothing():
    assert node_share({"CPU": 8.0, "memory": 16.0 * GIB}, 0.0) == {}


def test_what_the_nodes_environment_says_stays(monkeypatch):
    monkeypatch.setenv("RADIXFLEET_WORKER_THREADS", "7")
    assert node_share({"CPU": 8.0, "worker_slot": 1.0}, 1.0) == {}


class Context:
    """What Ray tells an actor of itself."""

    def get_node_id(self) -> str:
        return "n1"


async def test_a_report_is_given_while_the_addresses_of_the_routers_are_not_known(monkeypatch):
    """As they are while one of them starts again: the worker must not be taken for lost then."""
    monkeypatch.setattr("worker.ray_actor.ray.get_runtime_context", Context)
    actor = WorkerActor("m-0", {}, 1.0)
    try:
        assert (await actor.report(None)).phase == "starting"
        assert (await actor.report(["127.0.0.1:7070"])).node_id == "n1"
    finally:
        for task in (actor._life, actor._lifeline):
            task.cancel()


class Hosted:
    """The worker of an actor, without Ray; its end waits for `may_end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine()
        self.running: list[Worker] = []
        self.is_leaving, self.may_end = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr("worker.ray_actor.ray.get_runtime_context", Context)
        monkeypatch.setattr("worker.ray_actor.running_worker", self._running_worker)
        monkeypatch.setattr("worker.ray_actor.resolve_model", lambda *_: Path())
        monkeypatch.setattr("worker.ray_actor.load_tokenizer_spec", lambda _: None)
        monkeypatch.setattr("worker.ray_actor.make_engine", lambda *_: FakeEngine())
        monkeypatch.setattr("worker.ray_actor._own_node", dict)
        monkeypatch.setattr("worker.servicer.registration._BRIEF_S", 0.0)

    @asynccontextmanager
    async def actor(self) -> AsyncIterator[WorkerActor]:
        """It has loaded."""
        actor = WorkerActor("m-0", {"model": "m"}, 1.0)
        try:
            await until(lambda: bool(self.running))
            self.engine.become_ready()
            yield actor
            self.may_end.set()
            await actor.end()
        finally:
            actor._lifeline.cancel()

    @asynccontextmanager
    async def _running_worker(self, *_: object) -> AsyncIterator[Worker]:
        async with sim_worker(engine=self.engine, serving=False) as worker:
            self.running.append(worker)
            yield worker
            self.is_leaving.set()
            await self.may_end.wait()
            assert not worker.registration._tasks


async def test_a_worker_serves_from_when_the_first_router_has_reached_it(monkeypatch):
    """A rollout replaced all workers of a fleet by some that no router took, or could dial."""
    hosted = Hosted(monkeypatch)
    router = await RegisteringRouter().start()
    async with hosted.actor() as actor:
        await until(lambda: hosted.running[0].feed.status is WorkerStatus.SERVING)
        await actor.report(["127.0.0.1:1"])
        registration = hosted.running[0].registration
        await until(lambda: bool(registration.trouble))
        report = await actor.report(None)
        assert report.phase == "starting"
        assert report.message.startswith("not registered at 127.0.0.1:1: ")
        await actor.report([f"127.0.0.1:{router.port}"])
        await until(lambda: bool(router.registered) and not registration.trouble)
        report = await actor.report(None)
        assert (report.phase, report.message) == ("starting", ""), "as at every start, for a moment"
        monkeypatch.setattr("worker.ray_actor._UNREACHED_S", 0.0)
        report = await actor.report(None)
        assert (report.phase, report.message) == ("starting", f"no router has reached it at {report.address}")
        async with open_channel(hosted.running[0].address) as channel:
            await worker_pb2_grpc.WorkerStub(channel).WatchState(worker_pb2.WatchStateRequest()).read()
        report = await actor.report(None)
        assert (report.phase, report.message) == ("serving", "")
        await router.stop()
        await until(lambda: bool(registration.trouble))
        assert (await actor.report(None)).phase == "serving", "streams run, and the router comes back"


async def test_a_worker_that_is_ending_still_reports_and_registers_with_no_router_that_it_hears_of_now(monkeypatch):
    """Its supervisor asks it for reports until it has ended."""
    hosted = Hosted(monkeypatch)
    async with hosted.actor() as actor:
        (worker,) = hosted.running
        await actor.report(["127.0.0.1:2"])
        await until(lambda: bool(worker.registration.trouble))
        report = await actor.report([])
        assert report.message.startswith("not registered at 127.0.0.1:2: "), "it has loaded, and nobody can know"
        await until(lambda: not worker.registration._tasks)
        ending = asyncio.create_task(actor.end())
        await hosted.is_leaving.wait()
        report = await actor.report(["127.0.0.1:1"])
        assert report.address.rpartition(":")[2] == worker.address.rpartition(":")[2]
        assert report.capacity is not None
        hosted.may_end.set()
        await ending
        assert actor._failure == ""

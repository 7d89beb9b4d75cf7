"""The first moments of a router: requests wait for the workers that it is about to know, and only for those."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixfleet.channel import open_channel
from radixfleet.errors import Unavailable, UnknownModel
from radixfleet.types import WorkerStatus
from radixfleet.v1 import fleet_pb2
from router.app import drain, running_router
from router.other_processes import Place
from tests.support.http_client import get, post
from tests.support.look_aside import both_forms, ids_request, outcome
from tests.support.router_fixture import Fleet, fake_worker, running_fleet, settings
from tests.support.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test has its time: what it does may take long on a busy machine."""
    monkeypatch.setattr("router.core.GATHER_S", 120.0)
    monkeypatch.setattr("router.core.DIAL_S", 120.0)


def num_waiting(fleet: Fleet) -> float:
    return fleet.metric("queued_requests")


def num_waited(fleet: Fleet) -> float:
    return fleet.metric("queue_seconds_count")


ASKS: dict[str, Callable[[Fleet], Coroutine[None, None, object]]] = {
    "Generate": lambda fleet: fleet.client.complete("hello", max_new_tokens=4),
    "Generate for a model": lambda fleet: fleet.client.complete("hello", model="fake-model", max_new_tokens=4),
    "Tokenize": lambda fleet: fleet.client.tokenize("hello"),
    "GetModelInfo": lambda fleet: fleet.client.model_info(),
    "Explain": lambda fleet: fleet.client.explain("hello"),
}


@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_what_comes_before_the_workers_waits_for_them(
    ask: Callable[[Fleet], Coroutine[None, None, object]],
) -> None:
    """Behaviour 55: a router that starts again refuses nothing while its workers come back."""
    worker = fake_worker("w0")
    async with running_fleet([]) as fleet:
        asking = asyncio.create_task(ask(fleet))
        await until(lambda: num_waiting(fleet) == 1, "the request waits")
        await worker.start()
        await fleet.client.register(worker.address)
        await asking
        assert (num_waiting(fleet), num_waited(fleet)) == (0, 1)
        await worker.kill()


@pytest.mark.usefixtures("_long")
@both_forms
async def test_so_do_requests_that_go_past_the_router(form: str) -> None:
    worker = fake_worker("w0")
    async with running_fleet([]) as fleet:
        asking = asyncio.create_task(outcome(fleet.router.address, form, ids_request()))
        await until(lambda: num_waiting(fleet) == 1, "the request waits")
        await worker.start()
        await fleet.client.register(worker.address)
        routed = await asking
        assert isinstance(routed, fleet_pb2.RouteResponse)
        assert routed.worker_id == "w0"
        fleet.router.look_aside.close()
        await worker.kill()


@pytest.mark.usefixtures("_long")
async def test_so_do_requests_over_http_and_health_says_what_is_true() -> None:
    """Unavailable as long as nobody serves, though requests that come are not refused."""
    worker = fake_worker("w0")
    async with running_fleet([], http_port=0) as fleet, open_channel(fleet.router.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        body = {"prompt": "hello", "max_tokens": 4}
        asking = asyncio.create_task(post(fleet.router.http_port, "/v1/completions", body))
        described = asyncio.create_task(get(fleet.router.http_port, "/v1/models/fake-model"))
        await until(lambda: num_waiting(fleet) == 2, "the requests wait")
        assert (await get(fleet.router.http_port, "/v1/models")).json["data"] == [], "told at once, as it is"
        assert (await get(fleet.router.http_port, "/health")).status == 503
        await worker.start()
        await fleet.client.register(worker.address)
        assert (await asking).status == 200
        assert (await described).json["id"] == "fake-model"
        assert [model["id"] for model in (await get(fleet.router.http_port, "/v1/models")).json["data"]] == [
            "fake-model"
        ]
        assert (await watch.read()).status == SERVING
        assert (await get(fleet.router.http_port, "/health")).status == 200
        watch.cancel()
        await worker.kill()


@pytest.mark.usefixtures("_long")
async def test_health_waits_too_in_a_process_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that took the place of another said 503 until it knew the workers, which the other served with."""
    monkeypatch.setattr("router.http.operations._KNOWN_S", 120.0)
    worker = fake_worker("w0")
    async with running_router(settings(http_port=0), place=Place(tmp_path, 0)) as router:
        asking = asyncio.create_task(get(router.http_port, "/health"))
        await until(lambda: "" in router.gathering._served, "the question waits")
        await worker.start()
        router.registry.add(worker.address)
        assert (await asking).status == 200
        await worker.kill()


@pytest.mark.usefixtures("_long")
async def test_but_no_longer_than_probes_wait(tmp_path: Path) -> None:
    """The workers may yet come for 120 s, and it answers."""
    async with running_router(settings(http_port=0), place=Place(tmp_path, 0)) as router:
        async with asyncio.timeout(20):
            assert (await get(router.http_port, "/health")).status == 503
        assert router.gathering.awaits(""), "they are not known"


@pytest.mark.usefixtures("_long")
async def test_a_client_that_leaves_waits_no_more() -> None:
    async with running_fleet([]) as fleet:
        asking = asyncio.create_task(fleet.client.complete("hello"))
        await until(lambda: num_waiting(fleet) == 1, "the request waits")
        asking.cancel()
        await until(lambda: num_waiting(fleet) == 0, "it left")


@pytest.mark.usefixtures("_long")
async def test_a_router_that_stops_lets_nobody_wait() -> None:
    async with running_fleet([], http_port=0) as fleet:
        body = {"prompt": "hello", "max_tokens": 4}
        asking = asyncio.create_task(post(fleet.router.http_port, "/v1/completions", body))
        await until(lambda: num_waiting(fleet) == 1, "the request waits")
        stopping = asyncio.create_task(drain(fleet.router, 120.0))
        answer = await asking
        assert (answer.status, answer.json["error"]["message"].split(":")[0]) == (503, "the router stops")
        await stopping


@pytest.mark.usefixtures("_long")
async def test_a_worker_that_loads_is_not_waited_for() -> None:
    """All that the settings name have told how they are, so there is nothing to wait for."""
    loading = await fake_worker("slow", status=WorkerStatus.LOADING).start()
    async with running_fleet([], workers=(loading.address,)) as fleet:
        await until(lambda: fleet.router.registry.workers[0].connected, "the worker has told how it is")
        with pytest.raises(Unavailable, match="slow: loading"):
            await fleet.client.complete("hello")
        assert num_waited(fleet) == 0
        await loading.kill()


@pytest.mark.usefixtures("_long")
async def test_nor_is_a_model_that_no_worker_has() -> None:
    async with running_fleet(1) as fleet:
        with pytest.raises(UnknownModel):
            await fleet.client.complete("hello", model="another")
        assert num_waited(fleet) == 0


@pytest.mark.usefixtures("_long")
async def test_without_queues_nothing_waits() -> None:
    """`max_queued_requests` bounds these too."""
    async with running_fleet([], max_queued_requests=0) as fleet:
        with pytest.raises(Unavailable, match="no worker has registered"):
            await fleet.client.complete("hello")


async def test_the_wait_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.core.GATHER_S", 0.1)
    monkeypatch.setattr("router.core.DIAL_S", 0.2)
    async with running_fleet([], workers=("127.0.0.1:1",)) as fleet:
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 \(never answered\)"):
                await fleet.client.complete("hello")
        assert num_waited(fleet) <= 1, "later it is refused at once"


async def test_a_worker_that_is_known_and_has_not_answered_is_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has registered, and its machine is busy: nobody else is waited for any more."""
    monkeypatch.setattr("router.core.GATHER_S", 0.0)
    monkeypatch.setattr("router.core.DIAL_S", 120.0)
    worker = await fake_worker("w0").start()
    await worker.kill()
    async with running_fleet([]) as fleet:
        with pytest.raises(Unavailable, match="no worker has registered"):
            await fleet.client.complete("hello")
        await fleet.client.register(worker.address)
        asking = asyncio.create_task(fleet.client.complete("hello", max_new_tokens=4, timeout_s=60))
        await until(lambda: num_waiting(fleet) == 1, "the request waits")
        await worker.start(worker.port)
        await asking
        await worker.kill()

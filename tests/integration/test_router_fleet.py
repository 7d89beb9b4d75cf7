"""The Fleet service, health and reflection of a router, over real gRPC."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from radixfleet import convert
from radixfleet.channel import open_channel
from radixfleet.errors import InvalidRequest, Unavailable, UnknownWorker
from radixfleet.types import Load, MemoryPools, WorkerStatus
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_worker import Script
from tests.support.look_aside import asking_by, both_forms
from tests.support.router_fixture import Fleet, fake_worker, running_fleet, scrape
from tests.support.waiting import until


def lease_count(fleet: Fleet, outcome: str) -> float:
    return fleet.metric("leases_total", outcome=outcome)


@both_forms
async def test_route_books_and_the_worker_settles_what_the_client_does_by_itself(form: str) -> None:
    async with running_fleet(2) as fleet:
        route = await asking_by(fleet.client, form).route("x" * 300)
        worker = next(item for item in fleet.workers if item.worker_id == route.worker_id)
        state = fleet.state(worker)
        assert route.address == worker.address
        assert route.decision.policy == "min_cost"
        assert np.array_equal(route.token_ids, np.frombuffer(b"x" * 300, dtype=np.uint8))
        assert route.lease_s == 10.0
        assert (state.books.own_requests, state.books.own_tokens) == (1, 300)
        assert len(fleet.router.look_aside) == 1
        # What a look-aside client does next, with the router off the path.
        async with open_channel(route.address) as channel:
            prompt = inference_pb2.Prompt(token_ids=convert.pack_tokens(route.token_ids))
            request = inference_pb2.GenerateRequest(prompt=prompt, lease_id=route.lease_id)
            kinds = [
                reply.WhichOneof("event") async for reply in inference_pb2_grpc.InferenceStub(channel).Generate(request)
            ]
        assert kinds[0] == "started"
        worker.lease_event(route.lease_id, "STARTED", 64)
        await until(lambda: state.books.own_tokens == 236)
        worker.lease_event(route.lease_id, "FIRST_TOKEN")
        await until(lambda: state.books.own_tokens == 0)
        assert state.books.own_requests == 1
        worker.lease_event(route.lease_id, "ENDED")
        await until(lambda: state.books.own_requests == 0)
        assert lease_count(fleet, "ended") == 1
        assert fleet.metric("prompt_tokens_actual_total") == 64


@both_forms
async def test_a_burst_of_routes_is_spread_like_a_burst_of_requests(form: str) -> None:
    """Behaviour 45: choosing and booking are one step for look-aside clients too."""
    async with running_fleet(4, lease_s=0.5) as fleet:
        client = asking_by(fleet.client, form)
        routes = await asyncio.gather(*(client.route(f"{n:03d}" * 100) for n in range(64)))
        shares = [sum(route.worker_id == worker.worker_id for route in routes) for worker in fleet.workers]
        assert min(shares) >= 8
        await until(lambda: not len(fleet.router.look_aside))
        assert lease_count(fleet, "expired") == 64


@both_forms
async def test_leases_of_a_restarted_worker_are_settled(form: str) -> None:
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        await asking_by(fleet.client, form).route("x" * 300)
        worker.restart_engine()
        await until(lambda: not len(fleet.router.look_aside))
        assert lease_count(fleet, "interrupted") == 1


@both_forms
async def test_route_refuses_what_generate_refuses(form: str) -> None:
    async with running_fleet(1) as fleet:
        with pytest.raises(InvalidRequest):
            await asking_by(fleet.client, form).route("x", temperature=-1.0)
        assert fleet.state(0).books.own_requests == 0


async def test_explain_shows_every_worker_and_books_nothing() -> None:
    async with running_fleet(3) as fleet:
        first = await fleet.client.complete("e" * 640)
        fleet.workers[2].status = WorkerStatus.LOADING
        await until(lambda: len(fleet.eligible()) == 2)
        explanation = await fleet.client.explain("e" * 640 + "f" * 20)
        assert (explanation.policy, explanation.prompt_tokens, explanation.prompt_blocks) == ("min_cost", 660, 10)
        candidates = {item.worker_id: item for item in explanation.candidates}
        assert candidates["w2"].ineligible_reason == "loading"
        assert not candidates["w2"].eligible
        if first.started.worker_id != "w2":
            assert explanation.worker_id == first.started.worker_id
            assert explanation.reason == "prefix"
            chosen = candidates[explanation.worker_id]
            assert (chosen.matched_blocks, chosen.matched_tokens, chosen.uncached_tokens) == (10, 640, 20)
        eligible = [item for item in explanation.candidates if item.eligible]
        assert candidates[explanation.worker_id].cost == min(item.cost for item in eligible)
        assert all(state.books.own_requests == 0 for state in fleet.router.registry.workers)
        assert len(fleet.router.look_aside) == 0


async def test_explain_without_an_eligible_worker_says_why_of_each() -> None:
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        worker.status = WorkerStatus.FAILED
        await fleet.until_eligible()
        explanation = await fleet.client.explain("hello")
        assert explanation.worker_id == ""
        assert explanation.reason == "none"
        assert [item.ineligible_reason for item in explanation.candidates] == ["failed"]


async def test_list_workers_tells_what_the_worker_told() -> None:
    worker = fake_worker("w0", memory=MemoryPools("cpu", 100, 40, 50, 10, "mem_fraction_static"))
    async with running_fleet([worker]) as fleet:
        worker.extra_load = Load(2, 1, 70, 500, 90)
        await until(lambda: fleet.state(worker).books.reported == worker.extra_load)
        entry = (await fleet.client.list_workers())[0]
        assert (entry.worker_id, entry.address, entry.status) == ("w0", worker.address, WorkerStatus.SERVING)
        assert entry.connected
        assert entry.info.model == worker.model_info()
        assert entry.info.capacity == worker.capacity
        assert entry.info.memory == worker.memory
        assert entry.info.incarnation == worker.incarnation
        assert entry.info.advice == ()
        assert entry.load == worker.extra_load
        assert not entry.approximate
        assert entry.ineligible_reason == ""


async def test_list_workers_tells_what_the_operator_should_change() -> None:
    """Behaviour 62: where one looks for a slow worker, the advice stands."""
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        worker.publish(advice=["The KV pool is full: run fewer requests at once."])
        await until(lambda: fleet.state(worker).advice)
        entry = (await fleet.client.list_workers())[0]
        assert entry.info.advice == ("The KV pool is full: run fewer requests at once.",)


async def test_registering_again_is_harmless() -> None:
    async with running_fleet(1) as fleet:
        assert not await fleet.client.register(fleet.workers[0].address)
        assert len(await fleet.client.list_workers()) == 1


@pytest.mark.parametrize(
    "address", ["", "nowhere", "host:", "host:0", "host:70000", "a b:7", "ftp://host:7", "http://", ":7080"]
)
async def test_what_is_no_address_is_not_registered(address: str) -> None:
    async with running_fleet([]) as fleet:
        with pytest.raises(InvalidRequest) as caught:
            await fleet.client.register(address)
        assert caught.value.field == "address"
        assert await fleet.client.list_workers() == []


async def test_unknown_workers_are_not_found() -> None:
    async with running_fleet(1) as fleet:
        with pytest.raises(UnknownWorker, match="'nobody'; known are "):
            await fleet.client.drain("nobody")
        with pytest.raises(UnknownWorker):
            await fleet.client.remove("")


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf")])
async def test_a_grace_that_is_no_time_is_refused(grace_s: float) -> None:
    async with running_fleet(1) as fleet:
        with pytest.raises(InvalidRequest) as caught:
            await fleet.client.drain("w0", grace_s=grace_s)
        assert caught.value.field == "grace_s"
        assert fleet.eligible() == ["w0"]


async def test_draining_a_worker_that_cannot_be_reached_says_so() -> None:
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        await worker.kill()
        await fleet.until_eligible()
        with pytest.raises(Unavailable, match="w0 cannot be reached"):
            await fleet.client.drain("w0")


async def test_health_follows_the_workers() -> None:
    """Behaviour 60: SERVING exactly while a worker takes requests, for "" and each service."""
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet, open_channel(fleet.router.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [
            stub.Watch(health_pb2.HealthCheckRequest(service=name))
            for name in ("", "radixfleet.v1.Inference", "radixfleet.v1.Fleet")
        ]
        response = health_pb2.HealthCheckResponse
        for watch in watches:
            assert (await watch.read()).status == response.SERVING
        worker.status = WorkerStatus.FAILED
        for watch in watches:
            assert (await watch.read()).status == response.NOT_SERVING
        worker.status = WorkerStatus.SERVING
        for watch in watches:
            assert (await watch.read()).status == response.SERVING
            watch.cancel()


async def test_reflection_names_the_services() -> None:
    async with running_fleet([]) as fleet, open_channel(fleet.router.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"radixfleet.v1.Inference", "radixfleet.v1.Fleet", "grpc.health.v1.Health"} <= names
        call.cancel()


async def test_the_metrics_page_has_every_family_and_each_worker() -> None:
    """Behaviour 63: what a board asks for exists on a live endpoint, before anything has happened too."""
    worker = fake_worker("w0", script=lambda _: Script(tokens=3))
    async with running_fleet([worker]) as fleet:
        before = await asyncio.to_thread(scrape, fleet.router)
        for name, labels in (
            ("requests_total", "outcome=cancelled"),
            ("decisions_total", "reason=prefix"),
            ("retries_total", "result=refused"),
            ("leases_total", "outcome=expired"),
            ("workers", "status=serving"),
            ("worker_outstanding_prompt_tokens", "worker=w0"),
            ("worker_breaker", "state=closed,worker=w0"),
        ):
            assert f"radixfleet_router_{name}{{{labels}}}" in before
        await fleet.client.complete("x" * 200)
        await fleet.until_settled()
        after = await asyncio.to_thread(scrape, fleet.router)
        assert after["radixfleet_router_requests_total{outcome=ok}"] == 1
        assert after["radixfleet_router_prompt_tokens_asked_total"] == 200
        assert after["radixfleet_router_decision_seconds_count"] == 1
        assert after["radixfleet_router_tokenize_seconds_count"] == 1
        assert after["radixfleet_router_ttft_seconds_count"] == 1
        assert after["radixfleet_router_requests_in_flight"] == 0
        assert after["radixfleet_router_workers{status=serving}"] == 1
        assert after["radixfleet_router_worker_sketch_blocks{worker=w0}"] == 3
        assert after["radixfleet_router_sketch_blocks"] == 3
        assert after["radixfleet_router_worker_update_age_seconds{worker=w0}"] < 5

"""Every gRPC method of router and worker, tried without a key, with wrong ones, and with those that open it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from radixfleet.channel import open_channel
from radixfleet.clock import ManualClock
from radixfleet.endpoint import Endpoint
from radixfleet.keys import key_line
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, worker_pb2
from router.api.fleet_watch import HEARTBEAT_S
from router.app import running_router
from router.metrics import DOOR_REFUSALS
from router.workers.gathering import DIAL_S
from tests.support.look_aside import ids_request, open_stream
from tests.support.router_fixture import settings
from tests.support.secured_fleet import KEY, TOKEN, WRONG, SecuredFleet, secured_fleet
from tests.support.worker_fixture import sim_worker

CLIENT = {
    "Inference": ["Generate", "Tokenize", "Detokenize", "GetModelInfo"],
    "Fleet": ["Route", "RouteStream", "Explain", "ListWorkers", "WatchFleet"],
}
ADMIN = {
    "Fleet": ["Register", "Drain", "Resume", "Remove"],
    "Worker": ["GetInfo", "GetTokenizer", "WatchState", "Link", "Drain", "Resume", "FlushCache", "Abort"],
}
SERVICES = {
    name: file.DESCRIPTOR.services_by_name[name]
    for name, file in {"Inference": inference_pb2, "Fleet": fleet_pb2, "Worker": worker_pb2}.items()
}
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")


def methods(table: dict[str, list[str]]) -> list[str]:
    return [f"{service}.{method}" for service, names in table.items() for method in names]


async def outcome(endpoint: Endpoint, method: str) -> str:
    """The status of a call with an empty request. A stream that gives something, or waits, was let in: "OK".

    Asked again where a stream's request met the refusal on its way, for which gRPC's client says INTERNAL.
    """
    for _ in range(20):
        code = await outcome_once(endpoint, method)
        if code != "INTERNAL":
            return code
    return "INTERNAL"


async def outcome_once(endpoint: Endpoint, method: str) -> str:
    service, _, name = method.partition(".")
    descriptor: MethodDescriptor = SERVICES[service].methods_by_name[name]
    request = message_factory.GetMessageClass(descriptor.input_type)()
    path = f"/{descriptor.containing_service.full_name}/{name}"
    serialize = type(request).SerializeToString
    async with open_channel(endpoint) as channel:
        try:
            if not descriptor.server_streaming:
                await channel.unary_unary(path, serialize)(request, timeout=20)
                return "OK"
            make = channel.stream_stream if descriptor.client_streaming else channel.unary_stream
            call = make(path, serialize)(iter([request]) if descriptor.client_streaming else request, timeout=20)
            await call.read()
            return (await call.code()).name if call.done() else "OK"
        except grpc.aio.AioRpcError as error:
            if error.code().name in REFUSED:
                assert_explained(error)
            return error.code().name


def assert_explained(error: grpc.aio.AioRpcError) -> None:
    """A refusal carries ErrorInfo, and no key."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("radixfleet", error.code().name)
    for secret in (KEY, TOKEN, WRONG):
        assert secret not in str(status)


def test_the_tables_here_have_every_method() -> None:
    for name, service in SERVICES.items():
        assert sorted(CLIENT.get(name, []) + ADMIN.get(name, [])) == sorted(service.methods_by_name)


def places(method: str) -> list[str]:
    """Who serves it."""
    return {"Inference": ["router", "worker"], "Fleet": ["router"], "Worker": ["worker"]}[method.partition(".")[0]]


def endpoint(fleet: SecuredFleet, place: str, key: str | None) -> Endpoint:
    return fleet.router_endpoint(key) if place == "router" else fleet.worker_endpoint(key)


async def test_doors_of_clients() -> None:
    async with secured_fleet(None) as fleet:
        for method in methods(CLIENT):
            for place in places(method):
                for key in (None, WRONG):
                    assert await outcome(endpoint(fleet, place, key), method) == "UNAUTHENTICATED", (place, method)
                for key in (KEY, TOKEN):
                    assert await outcome(endpoint(fleet, place, key), method) not in REFUSED, (place, method)


async def test_doors_of_admins() -> None:
    async with secured_fleet(None) as fleet:
        for method in methods(ADMIN):
            for place in places(method):
                for key in (None, WRONG):
                    assert await outcome(endpoint(fleet, place, key), method) == "UNAUTHENTICATED", (place, method)
                assert await outcome(endpoint(fleet, place, KEY), method) == "PERMISSION_DENIED", (place, method)
                assert await outcome(endpoint(fleet, place, TOKEN), method) not in REFUSED, (place, method)
        counted = [fleet.router.metrics.door_refusals.labels(cause)._value.get() for cause in DOOR_REFUSALS]
        num_methods = len(ADMIN["Fleet"])
        assert counted == [2 * num_methods, num_methods, 0]


async def test_workers_of_a_fleet_without_clients_keys_serve_its_routers_alone() -> None:
    """Else who reaches a worker would go around whatever stands before the router."""
    async with sim_worker(admin_token=TOKEN) as worker:
        for method in methods(CLIENT):
            if "worker" in places(method):
                assert await outcome(Endpoint(worker.address), method) == "UNAUTHENTICATED"
                assert await outcome(Endpoint(worker.address, key=TOKEN), method) not in REFUSED
    async with running_router(settings(admin_token=TOKEN)) as router:
        assert await outcome(Endpoint(router.address), "Fleet.ListWorkers") == "OK"
        assert await outcome(Endpoint(router.address), "Fleet.Register") == "UNAUTHENTICATED"


async def test_health_is_open_and_reflection_is_not() -> None:
    async with secured_fleet(None) as fleet:
        for place in ("router", "worker"):
            async with open_channel(endpoint(fleet, place, None)) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                assert await health.Check(health_pb2.HealthCheckRequest())
                watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
                while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                    pass  # it follows a moment after the workers
                watch.cancel()
            assert await reflected(endpoint(fleet, place, None)) == "UNAUTHENTICATED"
            assert await reflected(endpoint(fleet, place, WRONG)) == "UNAUTHENTICATED"
            assert "radixfleet.v1.Inference" in await reflected(endpoint(fleet, place, KEY))


async def reflected(endpoint: Endpoint) -> str:
    """The names of the services, or the status."""
    async with open_channel(endpoint) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        try:
            answer = await call.read()
            return " ".join(service.name for service in answer.list_services_response.service)
        except grpc.aio.AioRpcError as error:
            return error.code().name


async def test_who_has_no_key_does_not_learn_which_methods_there_are() -> None:
    async with secured_fleet(None) as fleet:
        for path, known in (("/no.such.Service/Method", "UNIMPLEMENTED"), ("/radixfleet.v1.Fleet/No", "UNIMPLEMENTED")):
            for key, expected in ((None, "UNAUTHENTICATED"), (TOKEN, known)):
                async with open_channel(fleet.router_endpoint(key)) as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await channel.unary_unary(path)(b"")
                    assert caught.value.code().name == expected


async def test_other_engines_dialects_on_a_worker_need_the_admin_token() -> None:
    """Their events hold everybody's prompts, and their Abort knows no owner."""
    pytest.importorskip("smg_grpc_proto")
    path = "/sglang.grpc.scheduler.SglangScheduler/GetModelInfo"
    async with secured_fleet(None) as fleet:
        for key, refusal in ((None, "UNAUTHENTICATED"), (KEY, "PERMISSION_DENIED")):
            async with open_channel(fleet.worker_endpoint(key)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(path)(b"")
                assert caught.value.code().name == refusal
        async with open_channel(fleet.worker_endpoint(TOKEN)) as channel:
            assert await channel.unary_unary(path)(b"")


async def test_a_large_request_is_refused_before_it_is_read() -> None:
    """A client without a key cannot make the server take in 60 MB first: the refusal does not wait for the message."""
    async with secured_fleet(None) as fleet, open_channel(fleet.router_endpoint(WRONG)) as channel:
        call = channel.stream_stream("/radixfleet.v1.Inference/Generate")()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED  # nothing was sent at all


@dataclass(frozen=True)
class KeyedRouter:
    """A router whose file of keys has bob's, until it is carol's."""

    address: str
    clock: ManualClock
    file: Path

    def take_back(self, after_s: float = 1.0) -> None:
        """Bob's key opens nothing any more, once so much time has passed."""
        self.file.write_text(key_line("carol", "rfk_carols-own") + "\n")
        self.clock.advance(after_s)


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[KeyedRouter]:
    clock, file = ManualClock(), tmp_path / "keys"
    file.write_text(key_line("bob", "rfk_bobs-own") + "\n")
    async with running_router(settings(api_keys=(str(file),), admin_token=TOKEN), clock) as router:
        yield KeyedRouter(router.address, clock, file)


async def test_a_key_is_taken_up_and_taken_back_while_the_router_runs(keyed: KeyedRouter) -> None:
    bob, carol = Endpoint(keyed.address, key="rfk_bobs-own"), Endpoint(keyed.address, key="rfk_carols-own")
    assert await outcome(bob, "Fleet.ListWorkers") == "OK"
    assert await outcome(carol, "Fleet.ListWorkers") == "UNAUTHENTICATED"
    keyed.take_back()
    assert await outcome(bob, "Fleet.ListWorkers") == "UNAUTHENTICATED"
    assert await outcome(carol, "Fleet.ListWorkers") == "OK"


async def test_a_stream_of_requests_ends_when_its_key_is_taken_back(keyed: KeyedRouter) -> None:
    """`Fleet.RouteStream` lasts for days; a key that is gone opens nothing on it either."""
    async with open_stream(keyed.address, authorization="Bearer rfk_bobs-own") as stream:
        keyed.clock.advance(DIAL_S)  # the router waits for workers no longer
        await stream.ask(ids_request())
        assert status_pb2.Status.FromString((await stream.answer()).status).code == 14, "no worker, but let in"
        keyed.take_back()
        await stream.ask(ids_request())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.answer()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert_explained(caught.value)


async def test_who_watches_the_fleet_is_sent_nothing_more_when_its_key_is_taken_back(keyed: KeyedRouter) -> None:
    async with open_channel(Endpoint(keyed.address, key="rfk_bobs-own")) as channel:
        call = fleet_pb2_grpc.FleetStub(channel).WatchFleet(fleet_pb2.WatchFleetRequest(), timeout=60)
        assert (await call.read()).snapshot
        keyed.take_back(HEARTBEAT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert_explained(caught.value)

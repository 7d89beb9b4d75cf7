"""`Fleet.RouteStream`: what is particular to it. What it shares with Route is in the conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from radixfleet.channel import open_channel
from radixfleet.client import Client
from radixfleet.errors import InvalidRequest
from radixfleet.status import error_from_rpc, error_from_status, status_pb2
from radixfleet.v1 import fleet_pb2
from router.app import running_router
from tests.support.fake_worker import FakeWorker, Script
from tests.support.look_aside import Stream, ids_request, open_stream, text_request
from tests.support.router_fixture import Fleet, fake_worker, running_fleet, settings
from tests.support.waiting import until


def small_worker(gate: asyncio.Event) -> FakeWorker:
    """Room for one request, which ends when the gate opens."""
    worker = fake_worker(script=lambda _: Script(before_finish=gate))
    worker.capacity = replace(worker.capacity, max_running_requests=1)
    return worker


@asynccontextmanager
async def full_fleet(*others: FakeWorker) -> AsyncIterator[tuple[Fleet, Callable[[], Awaitable[None]]]]:
    """Its one worker of "fake-model" is busy with a request, until what comes beside it is called."""
    gate = asyncio.Event()
    worker = small_worker(gate)
    async with running_fleet([worker, *others]) as fleet:
        running = asyncio.create_task(fleet.client.complete("first", model="fake-model"))
        await until(lambda: worker.calls)

        async def free() -> None:
            gate.set()
            await running

        yield fleet, free


def count(fleet: Fleet, outcome: str) -> float:
    return fleet.metric("leases_total", outcome=outcome)


async def test_what_is_asked_in_one_message_is_answered_in_one() -> None:
    async with running_fleet(2) as fleet, open_stream(fleet.router.address) as stream:
        await stream.ask(*(ids_request(100 + n) for n in range(20)))
        answers = [await stream.answer() for _ in range(20)]
        assert stream.num_messages == 1
        assert sorted(answer.number for answer in answers) == list(range(1, 21))
        assert len({answer.route.lease_id for answer in answers}) == 20
        assert sum(state.books.own_requests for state in fleet.router.registry.workers) == 20


async def test_an_error_is_the_answer_of_its_own_request_alone() -> None:
    async with running_fleet(1) as fleet, open_stream(fleet.router.address) as stream:
        await stream.ask(ids_request(), ids_request(sampling={"top_p": 2.0}), text_request("hello"))
        answers = {answer.number: answer for answer in [await stream.answer() for _ in range(3)]}
        error = error_from_status(status_pb2.Status.FromString(answers[2].status))
        assert isinstance(error, InvalidRequest)
        assert error.field == "sampling.top_p"
        assert answers[1].route.worker_id == answers[3].route.worker_id == "w0"


async def test_who_waits_holds_up_nobody_and_may_be_cancelled() -> None:
    """Behaviour 44: also here, what waits for a worker ends with its client's wish."""
    async with (
        full_fleet(fake_worker("w1", model="other")) as (fleet, free),
        open_stream(fleet.router.address) as stream,
    ):
        await stream.ask(*(ids_request(model="fake-model") for _ in range(2)))
        await until(lambda: fleet.metric("queued_requests") == 2)
        await stream.ask(ids_request(model="other"))
        assert (await stream.answer()).number == 3
        await stream.call.write(fleet_pb2.RouteStreamRequest(cancels=[1, 77]))
        await until(lambda: fleet.metric("queued_requests") == 1)
        await free()
        assert (await stream.answer()).number == 2
        await stream.call.done_writing()
        with pytest.raises(EOFError):  # a cancelled request is not answered
            await stream.answer()


async def test_a_deadline_in_the_queue() -> None:
    async with full_fleet() as (fleet, free), open_stream(fleet.router.address) as stream:
        await stream.ask(ids_request(), timeout_s=0.05)
        status = status_pb2.Status.FromString((await stream.answer()).status)
        assert (status.code, "deadline" in status.message) == (4, True)
        await until(lambda: fleet.metric("queued_requests") == 0)
        await stream.ask(ids_request(), timeout_s=-1.0)
        assert status_pb2.Status.FromString((await stream.answer()).status).code == 4
        await stream.ask(ids_request(), timeout_s=float("nan"))
        assert status_pb2.Status.FromString((await stream.answer()).status).code == 3
        await free()


@pytest.mark.parametrize("how", ["cancelled", "dropped", "ended"])
async def test_leases_end_with_their_stream_but_for_those_that_have_begun(how: str) -> None:
    """Behaviour 43: a client that dies leaves no booking behind."""
    async with running_fleet(1) as fleet:
        channel = open_channel(fleet.router.address)
        stream = Stream(channel)
        await stream.ask(*(ids_request(200 + n) for n in range(3)))
        leases = [(await stream.answer()).route.lease_id for _ in range(3)]
        fleet.workers[0].lease_event(leases[0], "STARTED", 64)
        await until(lambda: fleet.metric("prompt_tokens_actual_total") == 64)
        if how == "cancelled":
            stream.call.cancel()
        elif how == "ended":
            await stream.call.done_writing()
            with pytest.raises(EOFError):
                await stream.answer()
        await channel.close()
        await until(lambda: len(fleet.router.look_aside) == 1)
        assert count(fleet, "released") == 2
        fleet.workers[0].lease_event(leases[0], "ENDED")
        await until(lambda: not len(fleet.router.look_aside))
        assert count(fleet, "ended") == 1


async def test_who_waits_leaves_the_queue_when_the_stream_breaks() -> None:
    async with full_fleet() as (fleet, free):
        async with open_stream(fleet.router.address) as stream:
            await stream.ask(*(ids_request() for _ in range(3)))
            await until(lambda: fleet.metric("queued_requests") == 3)
        await until(lambda: fleet.metric("queued_requests") == 0)
        await free()


async def test_a_client_that_says_so_keeps_its_leases() -> None:
    async with running_fleet(1) as fleet:
        async with open_stream(fleet.router.address) as stream:
            await stream.ask(ids_request(), keep_leases=True)
            lease_id = (await stream.answer()).route.lease_id
            await stream.call.done_writing()
            with pytest.raises(EOFError):
                await stream.answer()
        assert len(fleet.router.look_aside) == 1
        fleet.workers[0].lease_event(lease_id, "ENDED")
        await until(lambda: not len(fleet.router.look_aside))
        assert count(fleet, "released") == 0


async def test_a_client_ends_its_own_leases_and_no_others() -> None:
    async with running_fleet(1) as fleet, open_stream(fleet.router.address) as other:
        state = fleet.state(0)
        await other.ask(ids_request(500))
        foreign = (await other.answer()).route.lease_id
        async with open_stream(fleet.router.address) as stream:
            await stream.ask(ids_request(100), ids_request(200))
            sent, unsent = [(await stream.answer()).route.lease_id for _ in range(2)]
            ends = [fleet_pb2.LeaseEnd(lease_id=sent, cached_tokens=1000), fleet_pb2.LeaseEnd(lease_id=unsent)]
            ends += [fleet_pb2.LeaseEnd(lease_id=name) for name in (foreign, "unknown", unsent)]
            await stream.call.write(fleet_pb2.RouteStreamRequest(ends=ends))
            await until(lambda: state.books.own_requests == 1)
            assert state.books.own_tokens == 500
            assert (count(fleet, "ended"), count(fleet, "released")) == (1, 1)
            assert fleet.metric("prompt_tokens_actual_total") == 100, "no more is cached than there was"
        fleet.router.look_aside.close()


async def test_what_cannot_be_decoded_ends_the_stream_and_says_where() -> None:
    async with running_fleet(1) as fleet, open_channel(fleet.router.address) as channel:
        message = fleet_pb2.RouteStreamRequest(asks=[fleet_pb2.RouteAsk(number=1, request=text_request("ABCDEFGH"))])
        call = channel.stream_stream("/radixfleet.v1.Fleet/RouteStream")()
        await call.write(message.SerializeToString())
        assert fleet_pb2.RouteStreamResponse.FromString(await call.read()).answers[0].number == 1
        await call.write(message.SerializeToString().replace(b"ABCDEFGH", b"\xff" * 8))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = error_from_rpc(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == "asks[0].request.prompt.text"
        await until(lambda: not len(fleet.router.look_aside))


async def test_a_number_that_is_taken() -> None:
    async with full_fleet() as (fleet, free), open_stream(fleet.router.address) as stream:
        ask = fleet_pb2.RouteAsk(number=9, request=ids_request())
        await stream.call.write(fleet_pb2.RouteStreamRequest(asks=[ask, ask]))
        refused = await stream.answer()
        assert (refused.number, status_pb2.Status.FromString(refused.status).code) == (9, 3)
        await free()
        assert (await stream.answer()).HasField("route")


# The Python client.


async def test_the_client_asks_for_all_its_routes_on_one_stream_and_closing_it_ends_no_lease() -> None:
    async with running_fleet(2) as fleet:
        async with Client(fleet.router.address) as client:
            routes = await asyncio.gather(*(client.route(f"prompt {n}", timeout_s=60.0) for n in range(50)))
            assert len({route.lease_id for route in routes}) == 50
            client.end_lease(routes[0].lease_id)
            client.end_lease(routes[1].lease_id, cached_tokens=0)
            await until(lambda: len(fleet.router.look_aside) == 48)
        assert (count(fleet, "ended"), count(fleet, "released")) == (1, 1)
        assert len(fleet.router.look_aside) == 48
        fleet.router.look_aside.close()


async def test_the_client_goes_on_with_a_router_that_is_started_anew() -> None:
    async with running_fleet(1) as fleet:
        values = settings(workers=(fleet.workers[0].address,))
        async with running_router(values) as router:
            port = int(router.address.rpartition(":")[2])
            client = Client(router.address, timeout_s=60.0)
            await until(lambda: not router.registry.workers[0].ineligible_reason)
            await client.route("hello")
        async with running_router(values.model_copy(update={"port": port})) as router:
            assert (await client.route("hello")).worker_id == "w0"
            router.look_aside.close()
        await client.close()


async def test_a_client_that_leaves_takes_its_request_back() -> None:
    async with full_fleet() as (fleet, free):
        asking = asyncio.create_task(fleet.client.route("second"))
        await until(lambda: fleet.metric("queued_requests") == 1)
        asking.cancel()
        await until(lambda: fleet.metric("queued_requests") == 0)
        await free()
        assert not len(fleet.router.look_aside)

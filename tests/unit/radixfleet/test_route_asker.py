"""The client's side of `Fleet.RouteStream`, against a router that does what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from radixfleet.accepted import ACCEPTED
from radixfleet.channel import listen, make_server
from radixfleet.client import Client
from radixfleet.clock import ManualClock
from radixfleet.errors import Cancelled, DeadlineExceeded, Overloaded, Unauthenticated, Unavailable
from radixfleet.retry import RetryPolicy
from radixfleet.status import status_from_error
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.waiting import until


class FakeRouter(fleet_pb2_grpc.FleetServicer):
    """Answers each ask when `gate` is open, or with `error`."""

    def __init__(self) -> None:
        self.knows_streams = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        """Ends the stream at its next message."""
        self.door: Exception | None = None
        """Ends each stream before it is read from."""
        self.calls = 0
        self.streams = 0
        self.messages: list[fleet_pb2.RouteStreamRequest] = []
        self.ended: list[str] = []

    async def Route(self, request: fleet_pb2.RouteRequest, context: Any) -> fleet_pb2.RouteResponse:
        self.calls += 1
        return self._routed("by call")

    async def RouteStream(
        self, request_iterator: AsyncIterator[fleet_pb2.RouteStreamRequest], context: Any
    ) -> AsyncIterator[fleet_pb2.RouteStreamResponse]:
        if not self.knows_streams:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if self.door is not None:
            raise self.door
        await context.send_initial_metadata(ACCEPTED)
        self.streams += 1
        async for message in request_iterator:
            self.messages.append(message)
            if self.refusal is not None:
                refusal, self.refusal = self.refusal, None
                raise refusal
            self.ended += [end.lease_id for end in message.ends]
            for ask in message.asks:
                await self.gate.wait()
                yield fleet_pb2.RouteStreamResponse(answers=[self._answer(ask.number)])

    def _answer(self, number: int) -> fleet_pb2.RouteAnswer:
        if self.error is not None:
            status = status_from_error(self.error).SerializeToString()  # type: ignore[arg-type]  # one of ours
            return fleet_pb2.RouteAnswer(number=number, status=status)
        return fleet_pb2.RouteAnswer(number=number, route=self._routed(f"lease {number}"))

    def _routed(self, lease_id: str) -> fleet_pb2.RouteResponse:
        return fleet_pb2.RouteResponse(worker_id="w", lease_id=lease_id, token_ids={"ids": [1]})

    @property
    def cancelled(self) -> list[int]:
        return [number for message in self.messages for number in message.cancels]


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[FakeRouter, Client]]:
    router = FakeRouter()
    server, _ = await make_server(["radixfleet.v1.Fleet"])
    fleet_pb2_grpc.add_FleetServicer_to_server(router, server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    options = {"retry": RetryPolicy(retries=0)} | options
    async with Client(f"127.0.0.1:{port}", **options) as client:
        yield router, client
    await server.stop(None)


async def test_a_router_that_does_not_know_streams_is_asked_by_calls_and_again_after_a_while() -> None:
    clock = ManualClock()
    async with connected(clock=clock) as (router, client):
        router.knows_streams = False
        for _ in range(2):
            assert (await client.route("hello")).lease_id == "by call"
        router.knows_streams = True
        assert (await client.route("hello")).lease_id == "by call"
        assert (router.calls, router.streams) == (3, 0)
        clock.advance(60.0)
        assert (await client.route("hello")).lease_id == "lease 1"
        assert (router.calls, router.streams) == (3, 1)


async def test_nothing_is_sent_to_a_router_that_lets_nobody_in() -> None:
    """So that the refusal is heard, however fast it comes."""
    async with connected() as (router, client):
        router.door = Unauthenticated("who are you?")
        for _ in range(100):
            with pytest.raises(Unauthenticated, match="who are you"):
                await client.route("hello")
        assert not router.messages


async def test_requests_that_come_during_a_write_share_a_message() -> None:
    async with connected() as (router, client):
        await asyncio.gather(*(client.route(f"prompt {n}") for n in range(100)))
        assert router.streams == 1
        assert sum(len(message.asks) for message in router.messages) == 100
        assert len(router.messages) <= 3


async def test_messages_have_a_bounded_size() -> None:
    async with connected() as (router, client):
        await asyncio.gather(*(client.route("x" * 400_000) for _ in range(7)))
        assert sum(len(message.asks) for message in router.messages) == 7
        assert max(len(message.asks) for message in router.messages) <= 2


async def test_errors_are_those_of_a_call() -> None:
    async with connected() as (router, client):
        router.error = Overloaded("too many", retry_after_s=7.0, waiting_requests="3")
        with pytest.raises(Overloaded, match="too many") as caught:
            await client.route("hello")
        assert (caught.value.retry_after_s, caught.value.metadata) == (7.0, {"waiting_requests": "3"})


async def test_who_waits_when_the_stream_breaks_is_told_or_tries_again() -> None:
    async with connected() as (router, client):
        router.refusal = Unavailable("the router stops", retry_after_s=0.0)
        with pytest.raises(Unavailable, match="the router stops"):
            await client.route("hello")
    async with connected(retry=RetryPolicy(retries=1)) as (router, client):
        router.refusal = Unavailable("the router stops", retry_after_s=0.0)
        assert (await client.route("hello")).lease_id == "lease 1"
        assert router.streams == 2


async def test_a_deadline_is_kept_although_the_router_hangs_and_the_late_lease_is_given_back() -> None:
    async with connected() as (router, client):
        router.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await client.route("hello", timeout_s=1.0)
        await until(lambda: router.messages and router.messages[0].asks[0].timeout_s)
        router.gate.set()
        await until(lambda: router.ended == ["lease 1"])
        assert router.cancelled == [1]


async def test_who_leaves_takes_its_request_back() -> None:
    async with connected() as (router, client):
        router.gate.clear()
        asking = asyncio.create_task(client.route("hello"))
        await until(lambda: router.messages)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        router.gate.set()
        await until(lambda: router.cancelled == [1])
        await until(lambda: router.ended == ["lease 1"])


async def test_closing_tells_who_waits_and_keeps_the_leases() -> None:
    async with connected() as (router, client):
        await client.route("hello")
        router.gate.clear()
        asking = asyncio.create_task(client.route("hello"))
        await until(lambda: len(router.messages) == 2)
        closing = asyncio.create_task(client.close())
        with pytest.raises(Cancelled, match="closed"):
            await asking
        router.gate.set()
        await closing
        assert router.cancelled == [2]
        assert router.messages[-1].keep_leases


async def test_a_key_that_was_taken_back_is_shown_no_more() -> None:
    """The stream was opened with the old one; another stream may show a new one."""
    async with connected() as (router, client):
        await client.route("hello")
        router.refusal = Unauthenticated("the key is not known here")
        assert (await client.route("hello")).lease_id == "lease 1"
        assert router.streams == 2
    async with connected() as (router, client):
        router.refusal = Unauthenticated("the key is not known here")
        with pytest.raises(Unauthenticated):
            await client.route("hello")
        assert router.streams == 1

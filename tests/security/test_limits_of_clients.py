"""What one client may ask for over gRPC: requests a second, and requests at once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.errors import Overloaded
from radixfleet.status import error_from_status, status_pb2
from tests.support.fake_worker import Script
from tests.support.http_client import connected, post
from tests.support.look_aside import ids_request, open_stream
from tests.support.router_fixture import NO_RETRY, fake_worker, running_fleet
from tests.support.secured_fleet import KEY, TOKEN, secured_fleet
from tests.support.waiting import until


async def test_a_key_that_asks_too_often_hears_when_to_come_again() -> None:
    async with (
        secured_fleet(None, max_client_requests_per_s=0.02) as fleet,
        Client(fleet.router_endpoint(KEY), retry=NO_RETRY) as client,
        Client(fleet.router_endpoint(TOKEN), retry=NO_RETRY) as admin,
    ):
        await client.complete("hello", max_new_tokens=1)
        for call in (client.complete("hello", max_new_tokens=1), client.explain("hello"), client.tokenize("hello")):
            with pytest.raises(Overloaded, match="requests a second") as caught:
                await call
            assert caught.value.retry_after_s is not None
            assert 10 < caught.value.retry_after_s <= 50
            assert caught.value.metadata["limit"] == "requests_per_s"
        assert await client.list_workers()  # looking is free
        for _ in range(3):
            await admin.complete("hello", max_new_tokens=1)


async def test_streams_of_one_client_at_once() -> None:
    """Without keys a client is a host. A stream counts until it ends, also when its client leaves."""
    worker = fake_worker("w0", script=lambda _: Script(before_finish=asyncio.Event()))
    async with running_fleet([worker], max_client_requests=2) as fleet:
        address = Endpoint(fleet.router.address)
        async with Client(address, retry=NO_RETRY) as client:
            running = [asyncio.create_task(client.complete(f"p{number}")) for number in range(2)]
            await until(lambda: fleet.router.log.in_flight == 2, "two requests run")
            with pytest.raises(Overloaded, match="2 requests of this client are running"):
                await client.complete("one more")
            assert await client.list_workers()
            running[0].cancel()
            await until(lambda: fleet.router.log.in_flight == 1, "one has left")
            third = asyncio.create_task(client.complete("one more"))
            await until(lambda: fleet.router.log.in_flight == 2, "its place is taken")
            for task in (running[1], third):
                task.cancel()
            await asyncio.gather(*running, third, return_exceptions=True)


async def test_requests_that_wait_on_a_stream_are_open_requests() -> None:
    gate = asyncio.Event()
    worker = fake_worker("w0", script=lambda _: Script(before_finish=gate))
    worker.capacity = replace(worker.capacity, max_running_requests=1)
    quick = {"max_client_requests": 3, "lease_s": 1.0}
    async with running_fleet([worker], **quick) as fleet, open_stream(fleet.router.address) as stream:
        running = asyncio.create_task(fleet.client.complete("first"))
        await until(lambda: worker.calls)
        await stream.ask(*(ids_request() for _ in range(3)))
        refused = await stream.answer()
        assert refused.number == 3
        error = error_from_status(status_pb2.Status.FromString(refused.status))
        assert isinstance(error, Overloaded)
        assert error.metadata == {"limit": "open_requests", "max": "3"}
        gate.set()
        await running
        assert {(await stream.answer()).number for _ in range(2)} == {1, 2}
        await stream.ask(ids_request())
        assert (await stream.answer()).HasField("route")


async def test_what_is_cached_under_a_clients_salt_is_its_own_on_a_stream_too() -> None:
    """With `--isolate-clients`, the same prompt of two keys has no block in common."""
    async with secured_fleet(None, isolate_clients=True) as fleet:
        for key in (KEY, TOKEN):
            async with Client(fleet.router_endpoint(key)) as client:
                await client.route("x" * 640)
        assert fleet.router.sketch.num_blocks == 20
        fleet.router.look_aside.close()


async def test_a_request_over_http_counts_as_many_times_as_it_has_prompts() -> None:
    """A thousand prompts were one request, whatever the limits."""
    worker = fake_worker("w0", script=lambda _: Script(before_finish=asyncio.Event()))
    async with running_fleet([worker], max_client_requests=3, http_port=0) as fleet:
        port, path = fleet.router.http_port, "/v1/completions"
        never = await post(port, path, {"prompt": ["a"] * 4})
        assert (never.status, never.error["type"]) == (400, "invalid_request_error")
        assert "counts as 4 requests" in never.error["message"]
        async with connected(port) as connection:
            await connection.send("POST", path, json.dumps({"prompt": ["a", "b"]}).encode())
            await until(lambda: fleet.router.log.in_flight == 2)
            refused = await post(port, path, {"prompt": ["c", "d"]})
            assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
            connection.abort()
        await until(lambda: not fleet.router.log.in_flight)
        async with connected(port) as connection:
            await connection.send("POST", path, json.dumps({"prompt": ["a", "b", "c"]}).encode())
            await until(lambda: fleet.router.log.in_flight == 3)
            connection.abort()

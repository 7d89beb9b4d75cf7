"""Clients of HTTP that leave or read slowly: what they had is given back at once, and others do not feel it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.support.fake_worker import Call, Script
from tests.support.http_client import connected, post
from tests.support.http_fleet import http_fleet
from tests.support.router_fixture import fake_worker, running_fleet
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60_000, "ignore_eos": True}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT_BYTES = 10_000
MAX_BYTES_IN_FLIGHT = 16 * 1024**2


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_before_the_first_token_ends_its_request(stream: bool) -> None:
    """Behaviour 6."""
    worker = fake_worker("w0", script=lambda _: Script(before_first_token=asyncio.Event()))
    async with running_fleet([worker], http_port=0) as fleet:
        async with connected(fleet.router.http_port) as connection:
            await connection.send("POST", CHAT, json.dumps(HI | {"stream": stream}).encode())
            await until(lambda: worker.count("started") == 1, "the worker has it")
            connection.abort()
            await until(lambda: worker.count("cancelled") == 1, "the worker is told")
        await fleet.until_settled()
        assert fleet.metric("requests_total", outcome="cancelled") == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_after_the_first_token_frees_its_pages(stream: bool) -> None:
    """Behaviour 6: on leaving the block, no KV is in use and nothing is booked."""
    async with http_fleet() as fleet, connected(fleet.port) as connection:
        await connection.send("POST", CHAT, json.dumps(ENDLESS | {"stream": stream}).encode())
        if stream:
            await connection.head()
            await connection.chunk()
        else:
            await until(lambda: len(fleet.workers[0].requests), "it runs")
        connection.abort()
        await until(lambda: not len(fleet.workers[0].requests), "it is ended")
        assert (await post(fleet.port, CHAT, HI)).status == 200


async def test_a_client_that_leaves_while_it_waits_for_a_worker() -> None:
    gate = asyncio.Event()
    worker = fake_worker("w0", script=lambda _: Script(before_finish=gate))
    worker.capacity = worker.capacity.__class__(64 * 1024, 16, 1, 2048)
    async with running_fleet([worker], http_port=0) as fleet:
        running = [asyncio.create_task(post(fleet.router.http_port, CHAT, HI)) for _ in range(3)]
        await until(lambda: fleet.router.gate.num_waiting or worker.running == 3, "they are placed")
        async with connected(fleet.router.http_port) as connection:
            await connection.send("POST", CHAT, json.dumps(HI).encode())
            await until(lambda: fleet.router.log.in_flight == 4, "it is there")
            connection.abort()
            await until(lambda: fleet.router.log.in_flight == 3, "it is gone")
        gate.set()
        assert [answer.status for answer in await asyncio.gather(*running)] == [200] * 3


async def test_all_prompts_of_a_client_that_leaves_are_ended() -> None:
    worker = fake_worker("w0", script=lambda _: Script(before_finish=asyncio.Event()))
    async with running_fleet([worker], http_port=0) as fleet, connected(fleet.router.http_port) as connection:
        await connection.send("POST", "/v1/completions", json.dumps({"prompt": ["a", "b", "c"]}).encode())
        await until(lambda: worker.count("computed") == 3, "all run")
        connection.abort()
        await until(lambda: worker.count("cancelled") == 3, "all are ended")


async def test_a_client_that_hangs_up_after_the_last_byte_has_all_it_asked_for() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        for _ in range(5):
            await post(fleet.router.http_port, CHAT, HI | {"stream": True})
        await fleet.until_settled()
        assert fleet.metric("requests_total", outcome="ok") == 5
        assert fleet.metric("requests_total", outcome="cancelled") == 0


async def test_a_slow_reader_is_held_back_and_others_are_not() -> None:
    """Behaviour 57."""

    def script(call: Call) -> Script:
        if call.request.request_id == "torrent":
            return Script(tokens=100_000, text_bytes=TEXT_BYTES)
        return Script()

    worker = fake_worker("w0", script=script)
    async with running_fleet([worker], http_port=0) as fleet, connected(fleet.router.http_port) as connection:
        await connection.send(
            "POST", CHAT, json.dumps(ENDLESS | {"stream": True}).encode(), {"X-Request-ID": "torrent"}
        )
        await until(lambda: worker.calls and worker.calls[0].tokens_sent, "it flows")
        sent = await settled(lambda: worker.calls[0].tokens_sent)
        assert sent * TEXT_BYTES < MAX_BYTES_IN_FLIGHT
        async with asyncio.timeout(60):
            for _ in range(10):
                assert (await post(fleet.router.http_port, CHAT, HI)).status == 200
        await connection.head()
        received = 0
        while received < sent * TEXT_BYTES:
            received += len(await connection.chunk())
        await until(lambda: worker.calls[0].tokens_sent > sent, "it flows again")
        connection.abort()
        await until(lambda: worker.count("cancelled") == 1)


async def settled(count: Callable[[], int]) -> int:
    """A number, when it no longer grows."""
    while True:
        before = count()
        await asyncio.sleep(0.3)
        if count() == before:
            return before

"""What is particular to links of one stream; what they share with calls is in the conformance suite."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc.aio
import pytest

from radixfleet.channel import open_channel
from radixfleet.types import Incarnation
from router.dispatch.link import CallLink, LinkFailure, Reply
from router.dispatch.link_stream import StreamLink
from router.dispatch.links import Links
from router.dispatch.request import PreparedRequest
from tests.support.cuttable_wire import CuttableWire
from tests.support.fake_worker import FakeWorker, Script
from tests.support.router_fixture import fake_worker, running_fleet
from tests.support.router_parts import Parts, sendable
from tests.support.waiting import until


async def collect(link: StreamLink, request: PreparedRequest) -> list[Reply]:
    async with aclosing(link.generate(request, 10.0)) as replies:
        return [reply async for reply in replies]


async def test_a_worker_that_does_not_know_links_is_served_by_calls() -> None:
    worker = await fake_worker(knows_links=False).start()
    state = Parts(1).workers[0]
    async with open_channel(worker.address) as channel:
        link = StreamLink(channel, state)
        answers = await asyncio.gather(*(collect(link, sendable(20)) for _ in range(5)))
        assert all(replies[-1].kind == "end" for replies in answers)
        assert link._is_silent
        # Its next engine may be of a version that knows them.
        worker.knows_links = True
        await collect(link, sendable(20))
        assert worker.links == 0
        state.incarnation = Incarnation(2)
        await collect(link, sendable(20))
        assert worker.links == 1
        await link.close()
    await worker.kill()


async def test_a_worker_of_an_earlier_version_is_served_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a link without a word, and waits for requests: who waited for its word waited without end."""
    monkeypatch.setattr("tests.support.fake_worker.ACCEPTED", ())
    monkeypatch.setattr("router.dispatch.open_link._REFUSAL_S", 0.05)
    worker = await fake_worker().start()
    async with open_channel(worker.address) as channel:
        link = StreamLink(channel, Parts(1).workers[0])
        answers = await asyncio.gather(*(collect(link, sendable(20)) for _ in range(5)))
        assert all(replies[-1].kind == "end" for replies in answers)
        assert worker.links == 1
        assert link._is_silent
        await link.close()
    await worker.kill()


async def test_all_requests_of_a_worker_share_one_stream() -> None:
    async with running_fleet(1) as fleet:
        await asyncio.gather(*(fleet.client.complete(f"prompt {n}") for n in range(20)))
        assert fleet.workers[0].links == 1


async def test_links_can_be_switched_off() -> None:
    async with running_fleet(1, link=False) as fleet:
        await fleet.client.complete("hello")
        assert fleet.workers[0].links == 0


async def test_a_hung_worker_costs_no_more_than_the_deadline() -> None:
    """Its connection stands, and it never answers whether it knows links."""
    worker = await fake_worker().start()
    async with CuttableWire(worker.address) as wire, open_channel(wire.address) as channel:
        await channel.channel_ready()
        wire.freeze()
        link = StreamLink(channel, Parts(1).workers[0])
        with pytest.raises(LinkFailure) as caught:
            async with aclosing(link.generate(sendable(20), 0.2)) as replies:
                await anext(replies)
        assert caught.value.kind == "deadline"
        wire.mend()
        assert (await collect(link, sendable(20)))[-1].kind == "end"
        await link.close()
    await worker.kill()


async def test_links_of_workers_that_left_are_forgotten() -> None:
    workers: list[FakeWorker] = [await fake_worker(f"w{n}").start() for n in range(2)]
    parts = Parts(2)
    channels: dict[str, grpc.aio.Channel] = {
        state.address: open_channel(worker.address) for state, worker in zip(parts.workers, workers, strict=True)
    }
    links = Links(lambda state: channels[state.address], lambda _: None, streams=True)
    first, second = parts.workers
    link = links.to(first)
    assert links.to(first) is link
    first.removed = True
    with pytest.raises(LinkFailure, match="it was removed") as caught:  # a moment after it was chosen
        links.to(first)
    assert caught.value.kind == "transport"
    links.to(second)
    assert list(links._links) == [second]
    assert isinstance(Links(lambda state: channels[state.address], lambda _: None, streams=False).to(second), CallLink)
    await links.close()
    for channel in channels.values():
        await channel.close()
    for worker in workers:
        await worker.kill()


async def test_a_burst_of_long_prompts_goes_in_several_frames() -> None:
    """gRPC ends a stream with a message over its limit, and with it every request on the link."""
    worker = await fake_worker().start()
    async with open_channel(worker.address, max_message_bytes=2 * 1024**2) as channel:
        link = StreamLink(channel, Parts(1).workers[0])
        answers = await asyncio.gather(*(collect(link, sendable(100_000)) for _ in range(20)))
        assert all(replies[-1].kind == "end" for replies in answers)
        assert worker.links == 1
        await link.close()
    await worker.kill()


async def test_closing_ends_what_still_runs() -> None:
    worker = await fake_worker(script=lambda _: Script(before_finish=asyncio.Event())).start()
    async with open_channel(worker.address) as channel:
        link = StreamLink(channel, Parts(1).workers[0])
        running = asyncio.create_task(collect(link, sendable(20)))
        await until(lambda: worker.count("waiting") + worker.count("computed") == 1)
        await link.close()
        with pytest.raises(LinkFailure):
            await running
        await until(lambda: worker.running == 0)
    await worker.kill()

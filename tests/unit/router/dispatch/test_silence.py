"""Requests of ours leave a worker that is said to hang, whichever way they took to it, and however far they are."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from radixfleet.channel import open_channel
from radixfleet.errors import Unavailable
from router.dispatch.link import LinkFailure, WorkerLink
from router.dispatch.links import Links
from tests.support.cuttable_wire import CuttableWire
from tests.support.fake_worker import Script
from tests.support.router_fixture import fake_worker
from tests.support.router_parts import Parts, sendable
from tests.support.waiting import until


async def tokens_until_failure(link: WorkerLink) -> tuple[int, LinkFailure]:
    count = 0
    try:
        async with aclosing(link.generate(sendable(20), None)) as replies:
            async for reply in replies:
                count += len(reply.token_ids)
    except LinkFailure as failure:
        return count, failure
    raise AssertionError("it ended well")


@pytest.mark.parametrize("streams", [True, False], ids=["link", "calls"])
@pytest.mark.parametrize("began", [True, False], ids=["streaming", "not even greeted"])
async def test_all_that_wait_for_it_give_up(streams: bool, began: bool) -> None:
    worker = await fake_worker(script=lambda _: Script(tokens=3, before_finish=asyncio.Event())).start()
    state = Parts(1).workers[0]
    async with CuttableWire(worker.address) as wire, open_channel(wire.address) as channel:
        await channel.channel_ready()
        links = Links(lambda _: channel, lambda _: None, streams=streams)
        if not began:
            wire.freeze()
        running = [asyncio.create_task(tokens_until_failure(links.to(state))) for _ in range(3)]
        if began:
            await until(lambda: [call.tokens_sent for call in worker.calls] == [3] * 3)
            wire.freeze()
        else:
            await asyncio.sleep(0)  # they are sent, and nothing comes back
        state.on_silence()
        ended = await asyncio.gather(*running)
        assert {failure.kind for _, failure in ended} == {"transport"}
        assert all(isinstance(failure.error, Unavailable) for _, failure in ended)
        assert all(count <= 3 for count, _ in ended)

        # When it wakes it hears that they have left, and takes new ones.
        wire.mend()
        await until(lambda: all(call.state in {"cancelled", "failed"} for call in worker.calls), "they are aborted")
        worker.script = lambda _: Script()
        async with aclosing(links.to(state).generate(sendable(20), 60.0)) as replies:
            assert [reply.kind async for reply in replies][-1] == "end"
        await links.close()
    await worker.kill()

"""What our own workers promise beyond other engines: errors are told as they were made, at any point of an answer."""

from __future__ import annotations

import asyncio

import pytest

from radixfleet.channel import open_channel
from radixfleet.errors import InternalError, InvalidRequest, Overloaded, RadixfleetError, Unavailable
from router.dispatch.link import CallLink, LinkFailure, WorkerLink
from router.dispatch.link_stream import StreamLink
from tests.support.fake_worker import Script
from tests.support.router_fixture import fake_worker
from tests.support.router_parts import Parts, sendable
from tests.support.waiting import until


@pytest.fixture(params=["calls", "stream"])
def by_stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "stream")


async def failure(link: WorkerLink) -> tuple[int, LinkFailure]:
    """Started and tokens before the failure, and the failure."""
    count = 0
    try:
        async for reply in link.generate(sendable(), 30.0):
            count += len(reply.token_ids) or 1
    except LinkFailure as error:
        return count, error
    raise AssertionError("it ended well")


@pytest.mark.parametrize("after", [-1, 0, 3])
@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("too hot", field="sampling.temperature"),
        Overloaded("full", retry_after_s=2.5),
        Unavailable("draining"),
        InternalError("NaN in the logits"),
    ],
)
async def test_what_the_worker_says_comes_as_it_said_it(by_stream: bool, error: RadixfleetError, after: int) -> None:
    worker = await fake_worker(script=lambda _: Script(tokens=5, error=error, error_after=after)).start()
    try:
        async with open_channel(worker.address) as channel:
            link = StreamLink(channel, Parts(1).workers[0]) if by_stream else CallLink(channel, "w0")
            count, failed = await failure(link)
            assert count == after + 1
            assert failed.kind == "answer"
            assert type(failed.error) is type(error)
            assert str(failed.error) == str(error)
            assert failed.error.retry_after_s == error.retry_after_s
            assert getattr(failed.error, "field", "") == getattr(error, "field", "")
            if isinstance(link, StreamLink):
                await link.close()
    finally:
        await worker.kill()


async def test_a_closed_channel_is_a_broken_connection(by_stream: bool) -> None:
    worker = await fake_worker(script=lambda _: Script(before_finish=asyncio.Event())).start()
    channel = open_channel(worker.address)
    link = StreamLink(channel, Parts(1).workers[0]) if by_stream else CallLink(channel, "w0")
    running = asyncio.create_task(failure(link))
    await until(lambda: worker.count("computed") == 1)
    await channel.close()
    assert (await running)[1].kind == "transport"
    await until(lambda: worker.running == 0)
    await worker.kill()

"""What every way to a worker promises, whichever it is: a call for each request, or one stream for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc.aio
import pytest

from radixfleet.channel import open_channel
from radixfleet.errors import InternalError, InvalidRequest, Overloaded, RadixfleetError, Unavailable
from router.dispatch.link import CallLink, LinkFailure, Reply, WorkerLink
from router.dispatch.link_stream import StreamLink
from router.dispatch.request import PreparedRequest
from router.workers.state import WorkerState
from tests.support.cuttable_wire import CuttableWire
from tests.support.fake_worker import Call, FakeWorker, Script
from tests.support.router_fixture import fake_worker
from tests.support.router_parts import Parts, sendable
from tests.support.waiting import until

LinkKind = Callable[[grpc.aio.Channel, WorkerState], WorkerLink]


def call_link(channel: grpc.aio.Channel, worker: WorkerState) -> WorkerLink:
    return CallLink(channel, worker.name)


@pytest.fixture(params=[call_link, StreamLink], ids=["calls", "stream"])
def kind(request: pytest.FixtureRequest) -> LinkKind:
    return request.param


@asynccontextmanager
async def linked(worker: FakeWorker, kind: LinkKind, address: str = "") -> AsyncIterator[WorkerLink]:
    """A link to a worker that is started here unless its address is given; nothing is left running at the end."""
    if not address:
        await worker.start()
    try:
        async with open_channel(address or worker.address) as channel:
            link = kind(channel, Parts(1).workers[0])
            yield link
            await until(lambda: worker.running == 0, "no request is left at the worker")
            if isinstance(link, StreamLink):
                await link.close()
    finally:
        await worker.kill()


async def collect(link: WorkerLink, sent: PreparedRequest, timeout_s: float | None = 10.0) -> list[Reply]:
    async with aclosing(link.generate(sent, timeout_s)) as replies:
        return [reply async for reply in replies]


async def failure(link: WorkerLink, sent: PreparedRequest, timeout_s: float | None = 10.0) -> tuple[int, LinkFailure]:
    """Replies before the failure, and the failure."""
    count = 0
    try:
        async with aclosing(link.generate(sent, timeout_s)) as replies:
            async for _ in replies:
                count += 1
    except LinkFailure as error:
        return count, error
    raise AssertionError("it ended well")


async def test_an_answer_comes_whole_and_in_order(kind: LinkKind) -> None:
    worker = fake_worker(script=lambda _: Script(tokens=50))
    async with linked(worker, kind) as link:
        replies = await collect(link, sendable(20, "mine"))
        assert [reply.kind for reply in replies] == ["started", *["part"] * 50, "end"]
        assert [token for reply in replies for token in reply.token_ids] == [(20 + n) % 257 for n in range(50)]
        assert replies[0].message.started.request_id == "mine"
        assert replies[-1].message.finished.usage.completion_tokens == 50
        assert worker.calls[0].state == "finished"


async def test_all_completions_of_a_request_come_before_the_end(kind: LinkKind) -> None:
    worker = fake_worker(script=lambda _: Script(tokens=2, others=2))
    async with linked(worker, kind) as link:
        replies = await collect(link, sendable())
        assert [reply.index for reply in replies if reply.token_ids] == [0, 0, 1, 2]
        assert replies[-1].kind == "end"


async def test_many_requests_at_once_do_not_mix(kind: LinkKind) -> None:
    worker = fake_worker(script=lambda _: Script(tokens=8))
    async with linked(worker, kind) as link:
        answers = await asyncio.gather(*(collect(link, sendable(10 + n)) for n in range(60)))
        for n, replies in enumerate(answers):
            assert [token for reply in replies for token in reply.token_ids] == [10 + n + k for k in range(8)]


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
async def test_what_the_worker_says_comes_as_it_said_it(kind: LinkKind, error: RadixfleetError, after: int) -> None:
    worker = fake_worker(script=lambda _: Script(tokens=5, error=error, error_after=after))
    async with linked(worker, kind) as link:
        count, failed = await failure(link, sendable())
        assert count == after + 1
        assert failed.kind == "answer"
        assert type(failed.error) is type(error)
        assert str(failed.error) == str(error)
        assert failed.error.retry_after_s == error.retry_after_s
        assert getattr(failed.error, "field", "") == getattr(error, "field", "")


async def test_the_error_of_one_request_ends_no_other(kind: LinkKind) -> None:
    gate = asyncio.Event()

    def script(call: Call) -> Script:
        if call.request.request_id == "bad":
            return Script(error=InvalidRequest("no"))
        return Script(before_finish=gate)

    worker = fake_worker(script=script)
    async with linked(worker, kind) as link:
        good = asyncio.create_task(collect(link, sendable(name="good")))
        await until(lambda: worker.count("computed") == 1)
        await failure(link, sendable(name="bad"))
        gate.set()
        assert (await good)[-1].kind == "end"


async def test_an_answer_without_its_end_is_a_broken_connection(kind: LinkKind) -> None:
    """Behaviour 53: never a silent stop."""
    worker = fake_worker(script=lambda _: Script(tokens=2, finish=False))
    async with linked(worker, kind) as link:
        count, failed = await failure(link, sendable())
        assert (count, failed.kind) == (3, "transport")


@pytest.mark.parametrize("read", [0, 1, 3])
async def test_closing_ends_the_request_at_the_worker(kind: LinkKind, read: int) -> None:
    """Behaviour 6: before the worker said anything, before the first token, in the middle."""
    never = asyncio.Event()
    worker = fake_worker(
        script=lambda _: Script(
            before_start=never if read == 0 else None,
            before_first_token=never if read == 1 else None,
            before_finish=never,
        )
    )
    async with linked(worker, kind) as link:
        replies = link.generate(sendable(), None)
        for _ in range(read):
            await anext(replies)
        waiting = asyncio.ensure_future(anext(replies))
        await until(lambda: worker.calls)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await replies.aclose()
        await until(lambda: worker.count("cancelled") == 1)


async def test_a_deadline_ends_the_request_on_both_sides(kind: LinkKind) -> None:
    worker = fake_worker(script=lambda _: Script(before_first_token=asyncio.Event()))
    async with linked(worker, kind) as link:
        count, failed = await failure(link, sendable(), timeout_s=2.0)
        assert (count, failed.kind) == (1, "deadline")
        await until(lambda: worker.count("cancelled") == 1)
        remaining_s = worker.calls[0].time_remaining_s
        assert remaining_s is not None
        assert 0.0 < remaining_s <= 2.01


async def test_a_worker_that_is_not_there_is_a_broken_connection(kind: LinkKind) -> None:
    worker = await fake_worker().start()
    await worker.kill()
    async with linked(worker, kind, worker.address) as link:
        assert (await failure(link, sendable()))[1].kind == "transport"


async def test_a_connection_that_breaks_ends_what_is_on_it_and_nothing_after(kind: LinkKind) -> None:
    never = asyncio.Event()
    worker = fake_worker(script=lambda call: Script(before_finish=never if call.request.request_id == "old" else None))
    await worker.start()
    async with CuttableWire(worker.address) as wire, linked(worker, kind, wire.address) as link:
        open_requests = [asyncio.create_task(failure(link, sendable(name="old"))) for _ in range(5)]
        await until(lambda: worker.count("computed") == 5)
        wire.cut()
        for _, failed in await asyncio.gather(*open_requests):
            assert failed.kind == "transport"
        await until(lambda: worker.count("cancelled") == 5)
        wire.mend()

        async def answered() -> bool:
            try:
                return (await collect(link, sendable(name="new")))[-1].kind == "end"
            except LinkFailure:
                return False

        async with asyncio.timeout(10):
            while not await answered():  # noqa: ASYNC110  gRPC dials again in its own time
                await asyncio.sleep(0.05)


async def test_a_closed_channel_is_a_broken_connection(kind: LinkKind) -> None:
    worker = await fake_worker(script=lambda _: Script(before_finish=asyncio.Event())).start()
    state = Parts(1).workers[0]
    channel = open_channel(worker.address)
    link = kind(channel, state)
    running = asyncio.create_task(failure(link, sendable()))
    await until(lambda: worker.count("computed") == 1)
    await channel.close()
    assert (await running)[1].kind == "transport"
    await until(lambda: worker.running == 0)
    await worker.kill()


async def test_a_slow_reader_holds_back_its_own_request_alone(kind: LinkKind) -> None:
    """Behaviour 57: what is on the way is bounded, others go on, and nothing is lost."""
    total = 20_000

    def script(call: Call) -> Script:
        slow = call.request.request_id == "slow"
        return Script(tokens=total if slow else 10, text_bytes=2_000 if slow else 1)

    worker = fake_worker(script=script)
    async with linked(worker, kind) as link, aclosing(link.generate(sendable(name="slow"), None)) as slow:
        assert (await anext(slow)).kind == "started"
        await until(lambda: worker.calls[0].tokens_sent > 0)
        for _ in range(20):
            assert (await collect(link, sendable(name="quick")))[-1].kind == "end"
        assert worker.calls[0].tokens_sent < total // 2
        received = 0
        async for reply in slow:
            received += len(reply.token_ids)
        assert received == total


async def test_a_prompt_of_a_million_tokens_reaches_the_worker(kind: LinkKind) -> None:
    """Behaviour 41."""
    worker = fake_worker()
    async with linked(worker, kind) as link:
        assert (await collect(link, sendable(1_000_000)))[-1].kind == "end"
        assert len(worker.calls[0].tokens) == 1_000_000

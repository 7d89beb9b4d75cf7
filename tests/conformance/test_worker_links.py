"""What every way to a worker promises, whichever dialect it speaks: ours by calls or one stream, SGLang's and vLLM's
gRPC, OpenAI's HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from radixfleet.errors import InvalidRequest
from router.dispatch.link import LinkFailure, Reply, WorkerLink
from router.dispatch.request import PreparedRequest
from tests.support.cuttable_wire import CuttableWire
from tests.support.peers import PEERS, Levers, Peer, asks
from tests.support.router_parts import sendable
from tests.support.waiting import until


@pytest.fixture(params=PEERS)
def peer(request: pytest.FixtureRequest) -> Peer:
    return PEERS[request.param]()


@asynccontextmanager
async def linked(peer: Peer, address: str = "") -> AsyncIterator[WorkerLink]:
    """A link to a peer, started here unless its address is given; nothing is left running at the end."""
    if not address:
        await peer.start()
    try:
        async with peer.link(address) as link:
            yield link
            await until(lambda: set(peer.states) <= {"finished", "left", "failed"}, "no request is left at the peer")
    finally:
        await peer.kill()


def asking(length: int = 20, *, tokens: int = 4, n: int = 1) -> PreparedRequest:
    sent = sendable(length)
    asks(sent.message, tokens, n)
    return sent


async def collect(link: WorkerLink, sent: PreparedRequest, timeout_s: float | None = 30.0) -> list[Reply]:
    async with aclosing(link.generate(sent, timeout_s)) as replies:
        return [reply async for reply in replies]


async def failure(link: WorkerLink, sent: PreparedRequest, timeout_s: float | None = 30.0) -> tuple[int, LinkFailure]:
    """Tokens before the failure, and the failure."""
    count = 0
    try:
        async with aclosing(link.generate(sent, timeout_s)) as replies:
            async for reply in replies:
                count += reply.num_tokens
    except LinkFailure as error:
        return count, error
    raise AssertionError("it ended well")


async def test_an_answer_comes_whole_and_in_order(peer: Peer) -> None:
    async with linked(peer) as link:
        replies = await collect(link, asking(tokens=50))
        kinds = [reply.kind for reply in replies]
        assert kinds == ["started", *["part"] * (len(replies) - 2), "end"]  # tokens that come together may be joined
        assert sum(reply.num_tokens for reply in replies) == 50
        assert sum(len(reply.token_ids) for reply in replies) == 50
        assert replies[0].message.started.request_id == "r"
        assert replies[0].message.started.prompt_tokens == 20
        assert replies[-1].message.finished.usage.completion_tokens == 50
        assert peer.prompts == [20]
        await until(lambda: peer.states == ["finished"])


async def test_all_completions_of_a_request_come_before_the_end(peer: Peer) -> None:
    async with linked(peer) as link:
        replies = await collect(link, asking(tokens=2, n=3))
        assert {reply.index for reply in replies if reply.num_tokens} == {0, 1, 2}
        finished = [reply for reply in replies if reply.message.WhichOneof("event") == "finished"]
        assert sorted(reply.message.index for reply in finished) == [0, 1, 2]
        assert [reply.kind for reply in finished] == ["part", "part", "end"]


async def test_many_requests_at_once_do_not_mix(peer: Peer) -> None:
    async with linked(peer) as link:
        answers = await asyncio.gather(*(collect(link, asking(10 + n, tokens=8)) for n in range(40)))
        firsts = [next(reply.token_ids[0] for reply in replies if reply.token_ids) for replies in answers]
        alone = [await collect(link, asking(10 + n, tokens=8)) for n in range(40)]
        assert firsts == [next(reply.token_ids[0] for reply in replies if reply.token_ids) for replies in alone]
        assert len(set(firsts)) > 20


async def test_what_the_worker_refuses_comes_in_its_own_words(peer: Peer) -> None:
    peer.pull(Levers(refuses="too hot for this model"))
    async with linked(peer) as link:
        count, failed = await failure(link, asking())
        assert (count, failed.kind) == (0, "answer")
        assert isinstance(failed.error, InvalidRequest)
        assert "too hot for this model" in str(failed.error)


async def test_the_error_of_one_request_ends_no_other(peer: Peer) -> None:
    gate = asyncio.Event()
    peer.pull(Levers(before_end=gate))
    async with linked(peer) as link:
        good = asyncio.create_task(collect(link, asking()))
        await until(lambda: peer.tokens_sent > 0)
        peer.pull(Levers(before_end=gate, refuses="no"))
        await failure(link, asking())
        gate.set()
        assert (await good)[-1].kind == "end"


async def test_an_answer_without_its_end_is_a_failure_of_the_worker(peer: Peer) -> None:
    """Behaviour 53: never a silent stop."""
    peer.pull(Levers(breaks_off=True))
    async with linked(peer) as link:
        count, failed = await failure(link, asking(tokens=2))
        assert count == 2
        assert failed.kind == peer.broken_off


@pytest.mark.parametrize("when", ["before anything", "in the middle"])
async def test_closing_ends_the_request_at_the_worker(peer: Peer, when: str) -> None:
    """Behaviour 6."""
    never = asyncio.Event()
    in_the_middle = when == "in the middle"
    peer.pull(Levers(before_end=never) if in_the_middle else Levers(before_start=never))
    async with linked(peer) as link:
        replies = link.generate(asking(), None)
        if in_the_middle:
            while not (await anext(replies)).num_tokens:
                pass
        waiting = asyncio.ensure_future(_to_the_end(replies))
        await until(lambda: peer.states)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await replies.aclose()
        await until(lambda: peer.states == ["left"])


async def _to_the_end(replies: AsyncIterator[Reply]) -> None:
    async for _ in replies:
        pass


async def test_a_deadline_ends_the_request_on_both_sides(peer: Peer) -> None:
    peer.pull(Levers(before_end=asyncio.Event()))
    async with linked(peer) as link:
        _, failed = await failure(link, asking(), timeout_s=2.0)
        assert failed.kind == "deadline"
        await until(lambda: peer.states == ["left"])


async def test_a_worker_that_is_gone_is_a_broken_connection(peer: Peer) -> None:
    async with linked(peer) as link:
        await peer.kill()
        assert (await failure(link, asking()))[1].kind == "transport"


async def test_a_connection_that_breaks_ends_what_is_on_it_and_nothing_after(peer: Peer) -> None:
    gate = asyncio.Event()
    peer.pull(Levers(before_end=gate))
    await peer.start()
    async with CuttableWire(peer.address) as wire, linked(peer, wire.address) as link:
        open_requests = [asyncio.create_task(failure(link, asking())) for _ in range(5)]
        await until(lambda: len(peer.states) == 5 and peer.tokens_sent >= 5)
        wire.cut()
        for _, failed in await asyncio.gather(*open_requests):
            assert failed.kind == "transport"
        await until(lambda: peer.states.count("left") == 5)
        wire.mend()
        gate.set()

        async def answered() -> bool:
            try:
                return (await collect(link, asking()))[-1].kind == "end"
            except LinkFailure:
                return False

        async with asyncio.timeout(30):
            while not await answered():  # noqa: ASYNC110  gRPC dials again in its own time
                await asyncio.sleep(0.05)


async def test_a_slow_reader_holds_back_its_own_request_alone(peer: Peer) -> None:
    """Behaviour 57: what is on the way is bounded, others go on, and nothing is lost."""
    total = 600
    peer.pull(Levers(message_bytes=100_000))
    async with linked(peer) as link, aclosing(link.generate(asking(tokens=total), None)) as slow:
        assert (await anext(slow)).kind == "started"
        await until(lambda: peer.tokens_sent > 0)
        before = peer.tokens_sent
        for _ in range(10):
            assert (await collect(link, asking(tokens=10)))[-1].kind == "end"
        assert peer.tokens_sent - before < total // 2
        received = 0
        async for reply in slow:
            received += reply.num_tokens
        assert received == total


async def test_a_prompt_of_a_million_tokens_reaches_the_worker(peer: Peer) -> None:
    """Behaviour 41."""
    async with linked(peer) as link:
        assert (await collect(link, asking(1_000_000)))[-1].kind == "end"
        assert peer.prompts == [1_000_000]

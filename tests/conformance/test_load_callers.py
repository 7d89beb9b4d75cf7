"""What the driver of load tests is told of a request, whichever way it is put to a fleet: gRPC, or OpenAI's HTTP.

Our own router serves both, with fake workers behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import aiohttp
import pytest

from loadtest.callers import Caller, CallFailed, Ended, GrpcCaller, NewTokens, Placed, Said
from loadtest.driver import Driver
from loadtest.http_caller import HttpCaller, served_models
from loadtest.statistics import Objective, summarize
from loadtest.tokens import Run, TokenSource
from loadtest.workloads import Arrival
from radixfleet.client import Client
from radixfleet.errors import InvalidRequest, Unavailable
from tests.support.fake_worker import Script
from tests.support.router_fixture import NO_RETRY, Fleet, fake_worker, running_fleet
from tests.support.waiting import until

SOURCE = TokenSource(vocab_size=250, seed=0)


def arrival(at_s: float = 0.0, prompt: int = 300, answer: int = 4, run: int = 1) -> Arrival:
    return Arrival(at_s, (Run(run, prompt),), answer, 2, SOURCE)


@asynccontextmanager
async def calling(way: str, fleet: Fleet, timeout_s: float | None = 60.0) -> AsyncIterator[Caller]:
    """A caller of the fleet."""
    if way == "grpc":
        async with Client(fleet.router.address, retry=NO_RETRY) as client:
            yield GrpcCaller(client, timeout_s=timeout_s)
    else:
        url = f"http://127.0.0.1:{fleet.router.http_port}"
        async with aiohttp.ClientSession() as session:
            (served,) = await served_models(session, url)
            yield HttpCaller(session, url, model=served.name, timeout_s=timeout_s)


@pytest.fixture(params=["grpc", "http"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def said(caller: Caller) -> list[Said]:
    async with aclosing(caller.call(arrival())) as events:
        return [event async for event in events]


async def test_an_answer_is_placed_then_comes_then_ends(way: str) -> None:
    worker = fake_worker("w0", script=lambda _: Script(tokens=4))
    async with running_fleet([worker], http_port=0) as fleet, calling(way, fleet) as caller:
        first, *middle, last = await said(caller)
        assert isinstance(first, Placed)
        assert [type(event) for event in middle] == [NewTokens] * len(middle)
        assert sum(event.count for event in middle if isinstance(event, NewTokens)) == 4
        assert isinstance(last, Ended)
        assert last.output_tokens == 4
        sent = worker.calls[0].request
        assert (sent.sampling.max_new_tokens, sent.sampling.ignore_eos, sent.sampling.temperature) == (4, True, 0.0)
        assert worker.calls[0].tokens.tolist() == arrival().token_ids.tolist()


async def test_what_was_cached_is_in_the_outcome(way: str) -> None:
    async with running_fleet(1, http_port=0) as fleet, calling(way, fleet) as caller:
        driven = await Driver(caller, ()).drive("p", [arrival()])
        again = await Driver(caller, ()).drive("p", [arrival()])
        assert [each.result.outcomes[0].cached_tokens for each in (driven, again)] == [0, 256]
        assert again.result.outcomes[0].output_tokens == 4
        assert summarize(again.result, Objective()).hit_rate == pytest.approx(256 / 300)


async def test_a_refusal_is_a_failed_call_that_says_why(way: str) -> None:
    worker = fake_worker("w0", script=lambda _: Script(error=InvalidRequest("the prompt is odd", field="prompt")))
    async with running_fleet([worker], http_port=0) as fleet, calling(way, fleet) as caller:
        with pytest.raises(CallFailed, match="the prompt is odd"):
            await said(caller)
        assert len(worker.calls) == 1, "tried once"


@pytest.mark.parametrize(
    "script", [Script(tokens=2, finish=False), Script(error=Unavailable("gone"), error_after=2)], ids=["cut", "lost"]
)
async def test_an_answer_that_breaks_off_is_a_failed_call(way: str, script: Script) -> None:
    worker = fake_worker("w0", script=lambda _: script)
    async with running_fleet([worker], http_port=0) as fleet, calling(way, fleet) as caller:
        driven = await Driver(caller, ()).drive("p", [arrival()])
        (outcome,) = driven.result.outcomes
        assert outcome.error
        assert not outcome.is_complete
        assert outcome.output_tokens == 2, "what came before counts"


async def test_a_deadline_is_a_failed_call_and_ends_the_request(way: str) -> None:
    worker = fake_worker("w0", script=lambda _: Script(before_first_token=asyncio.Event()))
    async with running_fleet([worker], http_port=0) as fleet, calling(way, fleet, timeout_s=0.3) as caller:
        with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
            await said(caller)
        await until(lambda: not worker.running)


async def test_who_leaves_ends_the_request(way: str) -> None:
    worker = fake_worker("w0", script=lambda _: Script(before_finish=asyncio.Event()))
    async with running_fleet([worker], http_port=0) as fleet, calling(way, fleet) as caller:
        async with aclosing(caller.call(arrival())) as events:
            async for event in events:
                if isinstance(event, NewTokens):
                    break
        await until(lambda: worker.count("cancelled") == 1)


async def test_a_prompt_as_text_is_as_long_as_the_server_says() -> None:
    """And what was shared of it as large a part: here a word has several tokens."""
    worker = fake_worker("w0")
    async with running_fleet([worker], http_port=0) as fleet, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{fleet.router.http_port}"
        (served,) = await served_models(session, url)
        caller = HttpCaller(session, url, model=served.name, as_text=True)
        driven = await Driver(caller, ()).drive("p", [arrival(), arrival(at_s=0.3)])
        sent = len(worker.calls[0].tokens)
        assert sent > 300
        first, second = driven.result.outcomes
        assert (first.prompt_tokens, second.prompt_tokens) == (sent, sent)
        assert (first.ceiling_tokens, second.ceiling_tokens) == (0, round(299 / 300 * sent))
        assert first.error == ""

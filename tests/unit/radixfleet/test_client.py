"""The client against a server that plays scripts: what is retried, what is cancelled, what a caller is told."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from radixfleet.answers import Delta, Finished, PromptLogprobs, Started
from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RadixfleetError,
    Unavailable,
    UnknownModel,
    Unreachable,
)
from radixfleet.retry import RetryPolicy
from radixfleet.types import ChatMessage, FinishReason
from tests.support.fake_inference import (
    FakeInference,
    Silence,
    delta,
    finished,
    prompt_logprobs,
    serving,
    started,
    told,
)
from tests.support.ports import held_port
from tests.support.waiting import until

FAST = RetryPolicy(retries=2, first_s=0.001, longest_s=0.002)
WHOLE = (started(prompt_tokens=3, cached_tokens=2), delta(1, 2, text="ab"), delta(3, text="c"), finished("!"))


async def collect(client: Client, **options):
    return [event async for event in client.generate("hello", **options)]


async def test_events_come_in_order_and_complete_joins_them():
    fake = FakeInference([WHOLE])
    async with serving(fake) as address, Client(address) as client:
        events = await collect(client)
        completion = await client.complete("hello")
    assert [type(event) for event in events] == [Started, Delta, Delta, Finished]
    assert completion.text == "abc!"
    assert completion.token_ids == (1, 2, 3)
    assert completion.started.cached_tokens == 2
    assert completion.finished.reason is FinishReason.STOP
    assert 0 < completion.ttft_s <= completion.total_s
    assert fake.outcomes == ["done", "done"]


async def test_text_can_be_shown_as_it_comes():
    pieces: list[str] = []
    async with serving(FakeInference([WHOLE])) as address, Client(address) as client:
        completion = await client.complete("hello", on_text=pieces.append)
    assert pieces == ["ab", "c", "!"]
    assert completion.text == "abc!"


async def test_several_completions_are_told_apart_and_the_last_message_has_the_usage():
    """Behaviour 43: four indices, one usage; a completion that ends early does not end the stream."""
    script = [
        started(prompt_tokens=3),
        delta(1, text="a", index=2),
        delta(2, text="b", index=0),
        finished("!", index=2, usage=None),
        delta(3, text="c", index=1),
        delta(4, text="d", index=0),
        finished(index=3, usage=None),
        finished(index=0, usage=None),
        finished("?", index=1, usage={"prompt_tokens": 3, "completion_tokens": 4}),
    ]
    fake = FakeInference([script])
    pieces: list[str] = []
    async with serving(fake) as address, Client(address) as client:
        completion = await client.complete("hello", n=4, on_text=pieces.append)
        events = await collect(client)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in completion.choices] == ["bd", "c?", "a!", ""]
    assert [choice.token_ids for choice in completion.choices] == [(2, 4), (3,), (1,), ()]
    assert (completion.text, completion.token_ids) == ("bd", (2, 4))
    assert completion.usage.completion_tokens == 4
    assert "".join(pieces) == "bd"
    assert fake.requests[0].sampling.n == 4
    assert [event.usage is not None for event in events if isinstance(event, Finished)] == [False, False, False, True]
    assert fake.outcomes == ["done", "done"]


async def test_log_probabilities_arrive_with_their_tokens_and_those_of_the_prompt_before():
    script = [
        started(prompt_tokens=4),
        prompt_logprobs(1, told(-1.5), told(-2.5, (7, -0.25))),
        prompt_logprobs(3, told(-0.5)),
        delta(5, 6, text="x", logprobs=[told(-0.125, (5, -0.125), (9, -3.0)), told(-4.0)]),
        finished(),
    ]
    async with serving(FakeInference([script])) as address, Client(address) as client:
        completion = await client.complete("hello", logprobs=2, prompt_logprobs=1)
        events = await collect(client)
    assert [type(event) for event in events] == [Started, PromptLogprobs, PromptLogprobs, Delta, Finished]
    assert [event.start for event in events if isinstance(event, PromptLogprobs)] == [1, 3]
    assert [told.logprob for told in completion.prompt_logprobs] == [-1.5, -2.5, -0.5]
    assert completion.prompt_logprobs[1].top == ((7, -0.25),)
    assert [told.logprob for told in completion.choices[0].logprobs] == [-0.125, -4.0]
    assert completion.choices[0].logprobs[0].top == ((5, -0.125), (9, -3.0))


async def test_nothing_is_tried_again_after_the_prompts_log_probabilities():
    """Behaviour 53: what a caller has seen is not sent twice."""
    fake = FakeInference([[started(), prompt_logprobs(1, told(-1.0)), Unavailable("worker died")], WHOLE])
    async with serving(fake) as address, Client(address, retry=FAST) as client:
        with pytest.raises(Unavailable, match="worker died"):
            await collect(client)
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    "script",
    [
        [started(), finished(index=1, usage=None)],
        [started(), delta(1, index=1), finished()],
        [delta(1), finished()],
    ],
    ids=["no usage", "a completion without its end", "no start"],
)
async def test_a_stream_that_lacks_something_is_an_error(script):
    async with serving(FakeInference([script])) as address, Client(address) as client:
        with pytest.raises(InternalError):
            await client.complete("hello")


async def test_a_finished_call_is_not_cancelled_by_leaving_at_the_last_event():
    fake = FakeInference([WHOLE])
    async with serving(fake) as address, Client(address) as client:
        async for event in client.generate("hello"):
            if isinstance(event, Finished):
                break
    assert fake.outcomes == ["done"]


@pytest.mark.parametrize("error", [Unavailable("loading"), Overloaded("full")])
async def test_an_error_that_passes_is_tried_again_before_the_first_token(error):
    """Behaviour 53: retries happen before the first token, within a budget, and one Started is seen."""
    fake = FakeInference([[error], [started(), error], WHOLE])
    async with serving(fake) as address, Client(address, retry=FAST) as client:
        events = await collect(client)
    assert [type(event) for event in events] == [Started, Delta, Delta, Finished]
    assert fake.outcomes == ["failed", "failed", "done"]


async def test_the_budget_of_retries_ends():
    """Behaviour 53: within a budget; the caller gets the server's own error."""
    fake = FakeInference([[Unavailable("no worker left")]])
    async with serving(fake) as address, Client(address, retry=FAST) as client:
        with pytest.raises(Unavailable, match="no worker left"):
            await collect(client)
    assert len(fake.requests) == 3


async def test_nothing_is_tried_again_after_the_first_token():
    """Behaviour 53: a worker that dies mid-stream gives an error, and no text is repeated."""
    fake = FakeInference([[started(), delta(1, text="a"), Unavailable("worker died")], WHOLE])
    async with serving(fake) as address, Client(address, retry=FAST) as client:
        events = client.generate("hello")
        assert isinstance(await anext(events), Started)
        assert await anext(events) == Delta((1,), "a")
        with pytest.raises(Unavailable, match="worker died"):
            await anext(events)
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    "error", [InvalidRequest("bad", field="prompt"), UnknownModel("no such"), InternalError("oops")]
)
async def test_errors_that_stay_are_not_tried_again(error):
    fake = FakeInference([[error], WHOLE])
    async with serving(fake) as address, Client(address, retry=FAST) as client:
        with pytest.raises(type(error), match=str(error)) as caught:
            await collect(client)
    assert getattr(caught.value, "field", "") == getattr(error, "field", "")
    assert len(fake.requests) == 1


async def test_a_stream_that_just_ends_is_an_error():
    """Behaviour 53: never a silent stop."""
    fake = FakeInference([[started(), delta(1, text="a")]])
    async with serving(fake) as address, Client(address) as client:
        with pytest.raises(InternalError, match="Finished"):
            await client.complete("hello")


async def test_a_server_that_is_not_there_is_unavailable(unused_address):
    async with Client(unused_address, retry=RetryPolicy(retries=1, first_s=0.001, reconnect_s=1e9)) as client:
        with pytest.raises(Unreachable, match=f"^nothing answers at {unused_address}: Connection refused$"):
            await client.complete("hello")


class CountedRandom(Random):
    """Counts the waits between tries: each is drawn."""

    drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return 0.0


@pytest.mark.parametrize("call", [lambda client: client.complete("hello"), lambda client: client.tokenize("hello")])
async def test_a_server_that_has_answered_is_awaited_when_it_is_gone(call):
    """Behaviour 53: a router that is killed and started again takes longer than tries in a row."""
    waits = CountedRandom()
    async with serving(FakeInference([WHOLE])) as address:
        client = Client(address, retry=replace(FAST, reconnect_s=1e9), timeout_s=1000, random=waits)
        await call(client)
    waiting = asyncio.create_task(call(client))
    await until(lambda: waits.drawn > FAST.retries + 2, "it was tried more often than a server that answers")
    assert not waiting.done()
    async with serving(FakeInference([WHOLE]), port=int(address.rsplit(":", 1)[1])):
        await waiting
    await client.close()


async def test_a_server_that_is_gone_for_too_long_is_given_up():
    async with serving(FakeInference([WHOLE])) as address:
        client = Client(address, retry=replace(FAST, reconnect_s=30), clock=TickingClock())
        await client.complete("hello")
    for _ in range(2):
        with pytest.raises(Unreachable, match="Connection refused"):
            await client.complete("hello")
    await client.close()


@pytest.fixture
def unused_address():
    with held_port() as port:
        yield f"127.0.0.1:{port}"


async def test_break_ends_the_request_on_the_server():
    """Behaviour 6: a client that leaves the loop stops its generation."""
    fake = FakeInference([[started(), delta(1, text="a"), Silence()]])
    async with serving(fake) as address, Client(address) as client:
        async for event in client.generate("hello"):
            if isinstance(event, Delta):
                break
        await asyncio.wait_for(fake.ended.wait(), 60)
        assert fake.outcomes == ["cancelled"]


async def test_closing_ends_the_request_before_the_first_token():
    """Behaviour 6: also while nothing has come yet."""
    fake = FakeInference([[Silence()]])
    async with serving(fake) as address, Client(address) as client:
        async with aclosing(client.generate("hello")) as events:
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.wait_for(fake.received.wait(), 60)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await asyncio.wait_for(fake.ended.wait(), 60)
        assert fake.outcomes == ["cancelled"]


async def test_cancelling_the_task_ends_the_request_on_the_server():
    """Behaviour 6: a task that is cancelled in complete()."""
    fake = FakeInference([[started(), delta(1), Silence()]])
    async with serving(fake) as address, Client(address) as client:
        task = asyncio.ensure_future(client.complete("hello"))
        await asyncio.wait_for(fake.received.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(fake.ended.wait(), 60)
        assert fake.outcomes == ["cancelled"]


async def test_the_deadline_ends_a_silent_call():
    fake = FakeInference([[started(), delta(1), Silence()]])
    async with serving(fake) as address, Client(address) as client:
        with pytest.raises(
            DeadlineExceeded, match=r"timeout of 1 s ended the answer after 1 token: more time may help"
        ):
            await client.complete("hello", timeout_s=1.0)
        await asyncio.wait_for(fake.ended.wait(), 60)
    assert fake.outcomes == ["cancelled"]


class TickingClock:
    """Ten seconds pass whenever somebody looks."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        self.now_s += 10
        return self.now_s


async def test_one_deadline_holds_over_all_tries():
    fake = FakeInference([[Unavailable("loading")]])
    async with serving(fake) as address, Client(address, retry=FAST, timeout_s=100, clock=TickingClock()) as client:
        with pytest.raises(Unavailable):
            await client.complete("hello")
    assert fake.timeouts_s == pytest.approx([90, 70, 50], abs=5)


async def test_no_try_is_made_after_the_deadline():
    fake = FakeInference([[Unavailable("loading")]])
    async with serving(fake) as address, Client(address, retry=FAST, timeout_s=25, clock=TickingClock()) as client:
        with pytest.raises(DeadlineExceeded, match=r"timeout of 25 s \(it passed before the request could be sent\)"):
            await client.complete("hello")
    assert len(fake.requests) == 1


async def test_a_deadline_that_passes_says_which_it_was_and_what_the_server_knows_of_it():
    """A server tells what the request waited for; the timeout is known to the client alone."""
    fake = FakeInference([[DeadlineExceeded("it waited for a worker")]], [DeadlineExceeded("it waited for a worker")])
    told = r"no answer within the client's timeout of 90 s \(it waited for a worker\): more time may help, or"
    async with serving(fake) as address, Client(address, timeout_s=90) as client:
        with pytest.raises(DeadlineExceeded, match=told):
            await client.complete("hello")
        with pytest.raises(DeadlineExceeded, match=told):
            await client.tokenize("hello")


async def test_without_a_deadline_the_server_sees_none():
    fake = FakeInference([WHOLE])
    async with serving(fake) as address, Client(address) as client:
        await client.complete("hello")
    assert fake.timeouts_s == [None]


async def test_unary_calls_are_tried_again():
    fake = FakeInference(unary_errors=[Unavailable("loading"), Overloaded("full")])
    async with serving(fake) as address, Client(address, retry=FAST) as client:
        tokens = await client.tokenize("hé")
        text = await client.detokenize(tokens)
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == list("hé".encode())
    assert text == "hé"


async def test_a_call_that_the_server_lacks_says_so():
    async with serving(FakeInference()) as address, Client(address) as client:
        with pytest.raises(InternalError, match="does not implement"):
            await client.list_workers()


async def test_the_request_carries_what_was_asked():
    fake = FakeInference([WHOLE])
    messages = [ChatMessage("system", "be kind"), {"role": "user", "content": "hi"}]
    async with serving(fake) as address, Client(address) as client:
        await client.complete(
            messages, temperature=0.0, stop=["\n"], max_new_tokens=5, request_id="mine", cache_salt="s"
        )
        await client.complete([1, 2, 3])
    chat, ids = fake.requests
    assert [(m.role, m.content) for m in chat.prompt.chat.messages] == [("system", "be kind"), ("user", "hi")]
    assert chat.sampling.HasField("temperature")
    assert not chat.sampling.HasField("top_p")
    assert (chat.sampling.max_new_tokens, list(chat.sampling.stop)) == (5, ["\n"])
    assert (chat.request_id, chat.cache_salt) == ("mine", "s")
    assert np.frombuffer(ids.prompt.token_ids.packed, "<u4").tolist() == [1, 2, 3]


class TestRetryPolicy:
    policy = RetryPolicy(retries=3, first_s=1, longest_s=3)

    def delay(self, error: RadixfleetError, retry: int, left_s: float | None = None) -> float | None:
        return self.policy.delay_s(error, retry, left_s, Random(0))

    def test_doubles_up_to_the_longest(self):
        delays = [self.delay(Unavailable("x"), retry) for retry in range(3)]
        assert all(low <= delay <= low * 1.25 for low, delay in zip([1, 2, 3], delays, strict=True))

    def test_waits_as_long_as_the_server_asks(self):
        """RetryInfo is honoured: never less, a quarter more at most."""
        assert 7 <= self.delay(Overloaded("x", retry_after_s=7), 0) <= 7 * 1.25
        assert self.delay(Overloaded("x", retry_after_s=0), 2) == 0

    def test_gives_up(self):
        assert self.delay(Unavailable("x"), 3) is None
        assert self.delay(InternalError("x"), 0) is None

    def test_a_wait_that_outlasts_the_deadline_is_no_use(self):
        assert self.delay(Overloaded("x", retry_after_s=7), 0, left_s=7) is None
        assert self.delay(Overloaded("x", retry_after_s=7), 0, left_s=9) is not None

    @pytest.mark.parametrize(("retries", "gone_s", "tries"), [(3, 9.9, True), (3, 10.0, False), (0, 1.0, False)])
    def test_a_server_that_is_gone_is_looked_for_every_second_for_a_while(self, retries, gone_s, tries):
        policy = replace(self.policy, retries=retries, reconnect_s=10.0)
        delay = policy.delay_s(Unreachable("x"), 50, None, Random(0), gone_s=gone_s)
        assert (delay is not None) == tries
        assert delay is None or delay <= 1.25


async def test_the_wait_that_the_server_asks_for_reaches_the_client():
    """RetryInfo crosses the wire: with a deadline shorter than it, the client does not even try again."""
    fake = FakeInference([[Overloaded("full", retry_after_s=60)], WHOLE])
    async with serving(fake) as address, Client(address, retry=FAST) as client:
        with pytest.raises(Overloaded) as caught:
            await client.complete("hello", timeout_s=30)
    assert caught.value.retry_after_s == pytest.approx(60)
    assert len(fake.requests) == 1


@pytest.mark.parametrize("call", [lambda client: client.complete("hello"), lambda client: client.tokenize("hello")])
async def test_closing_the_client_ends_what_waits_for_another_try(call):
    busy = Overloaded("full", retry_after_s=1e6)
    waits = CountedRandom()
    async with serving(FakeInference([[busy]], [busy])) as address:
        client = Client(address, random=waits)
        calling = asyncio.create_task(call(client))
        await until(lambda: waits.drawn, "it waits for its second try")
        await client.close()
        with pytest.raises(Cancelled, match="closed"):
            await calling


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.complete("hello"),
        lambda client: client.tokenize("hello"),
        lambda client: client.route("hello"),
        lambda client: anext(client.watch_fleet()),
    ],
)
async def test_a_client_that_is_closed_says_so(call):
    client = Client("127.0.0.1:1")
    await client.close()
    with pytest.raises(Cancelled, match="closed"):
        await call(client)


def test_a_client_belongs_to_one_event_loop():
    async def made() -> Client:
        return Client("127.0.0.1:1")

    with pytest.raises(RuntimeError, match="no running event loop"):
        Client("127.0.0.1:1")
    with asyncio.Runner() as first, asyncio.Runner() as second:
        client = first.run(made())
        for call in (collect(client), client.tokenize("hello"), anext(client.watch_fleet())):
            with pytest.raises(RuntimeError, match="another event loop"):
                second.run(awaited(call))
        first.run(client.close())


async def awaited(call):
    return await call


async def test_closing_the_client_ends_what_runs():
    fake = FakeInference([[started(), delta(1), Silence()]])
    async with serving(fake) as address:
        async with Client(address) as client:
            events = client.generate("hello")
            assert isinstance(await anext(events), Started)
            assert isinstance(await anext(events), Delta)
        await asyncio.wait_for(fake.ended.wait(), 60)
        with pytest.raises(Cancelled, match="closed"):
            await anext(events)
    assert fake.outcomes == ["cancelled"]


@pytest.mark.parametrize("target", ["", "http://127.0.0.1:7072", Endpoint("a:b")])
async def test_what_is_no_address_is_refused_at_once(target):
    with pytest.raises(ValueError, match="write host:port"):
        Client(target)

"""Replies that wait for a reader: joined without a token, a text or a log probability lost, moved or repeated."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from radixfleet.channel import open_channel
from radixfleet.v1 import inference_pb2
from router.dispatch.inbox import Inbox
from router.dispatch.link import LinkFailure, Reply, broken, joined, reply_of
from router.dispatch.link_stream import StreamLink
from router.dispatch.open_link import CREDIT
from tests.support.fake_worker import Script
from tests.support.router_fixture import fake_worker
from tests.support.router_parts import Parts, sendable
from tests.support.waiting import until

Message = inference_pb2.GenerateResponse


def delta(*ids: int, text: str = "", index: int = 0, logprobs: int = 0) -> Message:
    each = [inference_pb2.TokenLogprobs(logprob=-float(token), top_token_ids=[token]) for token in ids[:logprobs]]
    return Message(delta=inference_pb2.Delta(token_ids=ids, text=text, logprobs=each), index=index)


STARTED = Message(started=inference_pb2.Started(request_id="r"))
FINISHED = Message(finished=inference_pb2.Finished(text="end"), index=1)
LAST = Message(finished=inference_pb2.Finished(usage=inference_pb2.Usage(completion_tokens=3)))
PROMPT = Message(prompt_logprobs=inference_pb2.PromptLogprobs(start=1))
messages = st.one_of(
    st.builds(
        lambda ids, text, index: delta(*ids, text=text, index=index, logprobs=len(ids)),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from(["", "a", "é"]),
        st.integers(0, 1),
    ),
    st.sampled_from([STARTED, FINISHED, PROMPT, LAST]),
)


def facts(taken: list[Message]) -> list[tuple[object, ...]]:
    """What a client makes of messages, token by token and text by text, in order."""
    seen: list[tuple[object, ...]] = []
    for message in taken:
        kind = message.WhichOneof("event")
        if kind != "delta":
            seen.append((kind, message.SerializeToString()))
            continue
        seen += [("token", message.index, token) for token in message.delta.token_ids]
        seen += [("logprob", message.index, each.logprob) for each in message.delta.logprobs]
    return seen


def streams(taken: list[Message]) -> dict[tuple[object, ...], list[object]]:
    """The same by completion and kind: where the order within a message says nothing."""
    found: dict[tuple[object, ...], list[object]] = {}
    for kind, *rest in facts(taken):
        found.setdefault((kind, *rest[:-1]), []).append(rest[-1])
    for message in taken:
        if message.WhichOneof("event") == "delta":
            key = ("text", message.index)
            found[key] = ["".join(str(piece) for piece in [*found.get(key, []), message.delta.text])]
    return found


async def drained(inbox: Inbox, count: int) -> tuple[list[Message], int]:
    """Everything, and how many messages of the worker it was."""
    taken, counted = [], 0
    while counted < count:
        item, here = await inbox.get()
        assert isinstance(item, Reply)
        taken.append(item.message)
        counted += here
    return taken, counted


@given(st.lists(messages, max_size=12))
def test_nothing_is_lost_moved_or_repeated(sent: list[Message]) -> None:
    async def run() -> tuple[list[Message], int]:
        inbox = Inbox()
        for message in sent:
            copy = Message()
            copy.CopyFrom(message)
            inbox.put(reply_of(copy))
        return await drained(inbox, len(sent))

    taken, counted = asyncio.run(run())
    assert counted == len(sent)
    assert streams(taken) == streams(sent)
    order = [fact for fact in facts(taken) if fact[0] != "logprob"]
    assert order == [fact for fact in facts(sent) if fact[0] != "logprob"]


def test_tokens_of_one_completion_are_joined_and_of_two_are_not() -> None:
    first, second, other = [
        reply_of(message) for message in (delta(1, text="a"), delta(2, 3, text="b"), delta(9, index=1))
    ]
    assert joined(first, second)
    assert (list(first.token_ids), first.num_tokens, first.message.delta.text) == ([1, 2, 3], 3, "ab")
    assert not joined(first, other)
    assert not joined(first, reply_of(LAST))
    assert not joined(reply_of(STARTED), first)


async def test_a_failure_comes_after_what_was_there_before_it() -> None:
    inbox = Inbox()
    for message in (delta(1), delta(2)):
        inbox.put(reply_of(message))
    inbox.put(broken("w0", "gone"))
    reply, count = await inbox.get()
    assert isinstance(reply, Reply)
    assert (list(reply.token_ids), count) == ([1, 2], 2)
    assert isinstance((await inbox.get())[0], LinkFailure)


async def test_what_is_joined_gives_back_all_its_credit() -> None:
    """A reader that stops holds the worker back after CREDIT messages, and one that goes on gets all."""
    tokens = 10 * CREDIT
    worker = await fake_worker(script=lambda _: Script(tokens=tokens)).start()
    async with open_channel(worker.address) as channel:
        link = StreamLink(channel, Parts(1).workers[0])
        replies = link.generate(sendable(), 30.0)
        received = len((await anext(replies)).token_ids)
        received += len((await anext(replies)).token_ids)
        await until(lambda: worker.calls[0].tokens_sent >= CREDIT // 2)
        assert worker.calls[0].tokens_sent <= 2 * CREDIT
        async for reply in replies:
            received += len(reply.token_ids)
        assert received == tokens
        await link.close()
    await worker.kill()

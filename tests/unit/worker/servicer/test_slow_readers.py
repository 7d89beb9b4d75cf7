"""Clients that read slowly, or not at all for a while."""

from __future__ import annotations

import grpc.aio

from radixfleet.accepted import is_accepted
from radixfleet.channel import client_options, open_channel
from radixfleet.text import Tokenizer
from radixfleet.types import FinishReason
from radixfleet.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.answers import collect, generate, request
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import until
from tests.support.worker_fixture import sim_runner, sim_worker

TOKENS = 1_500
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]


async def test_a_slow_reader_is_held_back_and_nobody_else_is() -> None:
    """Behaviour 57: flow control suspends the writing; the engine ends on time, and others run."""
    async with (
        sim_worker(sim_runner(verify=False)) as worker,
        grpc.aio.insecure_channel(worker.address, options=[*client_options(), *SMALL_WINDOW]) as slow_channel,
        open_channel(worker.address) as channel,
    ):
        slow_call = inference_pb2_grpc.InferenceStub(slow_channel).Generate(
            request("slow", max_new_tokens=TOKENS, ignore_eos=True)
        )
        await slow_call.initial_metadata()
        await until(lambda: worker.engine.num_open == 0)
        assert len(worker.requests) == 1, "the engine is done, and the client is still to be told"

        stub = inference_pb2_grpc.InferenceStub(channel)
        other = await generate(stub, "slow", max_new_tokens=TOKENS, ignore_eos=True)
        assert len(worker.requests) == 1

        slow = await collect(slow_call)
        assert slow.token_ids == other.token_ids
        assert slow.text == other.text == Tokenizer(byte_spec()).decode(other.token_ids)
        largest = max(len(delta.token_ids) for delta in slow.deltas)
        assert largest > TOKENS // 2, "what piled up came as one delta"


async def test_a_stop_string_ends_the_generation_of_a_client_that_does_not_read() -> None:
    """The engine does not go on to max_new_tokens because nobody fetches the text."""
    async with (
        sim_worker(sim_runner(verify=False)) as worker,
        grpc.aio.insecure_channel(worker.address, options=[*client_options(), *SMALL_WINDOW]) as slow_channel,
        open_channel(worker.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        whole = await generate(stub, "slow", max_new_tokens=TOKENS, ignore_eos=True)
        at = next(at for at in range(TOKENS // 2, TOKENS) if "\ufffd" not in whole.text[at : at + 4])
        stop = whole.text[at : at + 4]
        slow_call = inference_pb2_grpc.InferenceStub(slow_channel).Generate(
            request("slow", max_new_tokens=60_000, ignore_eos=True, stop=[stop])
        )
        await slow_call.initial_metadata()
        await until(lambda: worker.engine.num_open == 0)
        assert len(worker.requests) == 1
        answer = await collect(slow_call)
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.finished.matched_stop == stop


async def test_cancelling_a_call_that_is_held_back_ends_it() -> None:
    """Behaviour 6: the server is waiting to write, not to read, when the client goes away."""
    async with (
        sim_worker(sim_runner(verify=False)) as worker,
        grpc.aio.insecure_channel(worker.address, options=[*client_options(), *SMALL_WINDOW]) as slow_channel,
    ):
        call = inference_pb2_grpc.InferenceStub(slow_channel).Generate(
            request("slow", max_new_tokens=TOKENS, ignore_eos=True)
        )
        await call.initial_metadata()
        await until(lambda: worker.engine.num_open == 0)
        assert len(worker.requests) == 1
        call.cancel()
        await until(lambda: len(worker.requests) == 0)


async def test_tokens_without_credit_wait_joined_on_a_link() -> None:
    """Behaviour 57: a router that gives no credit is sent nothing, and then all that waits as one message."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        link = worker_pb2_grpc.WorkerStub(channel).Link()
        assert await is_accepted(link)
        start = worker_pb2.LinkStart(number=7, request=request("slow", ignore_eos=True), credit=2)
        await link.write(worker_pb2.RouterFrame(starts=[start]))
        await until(lambda: len(engine.submits) == 1)
        uid = engine.submits[0].uid
        engine.admit(uid)
        engine.output(uid, ord("a"))
        assert [each.WhichOneof("event") for each in await responses(link, 2)] == ["started", "delta"]
        for token_id in b"bcd":
            engine.output(uid, token_id)
        engine.end(uid, FinishReason.LENGTH)
        await until(lambda: not engine.num_open)
        await link.write(worker_pb2.RouterFrame(credits=[worker_pb2.LinkCredit(number=7, credit=2)]))
        delta, finished = await responses(link, 2)
        assert (delta.delta.text, list(delta.delta.token_ids)) == ("bcd", list(b"bcd"))
        assert finished.finished.usage.completion_tokens == 4
        await until(lambda: not len(worker.requests))
        link.cancel()


async def responses(link: grpc.aio.StreamStreamCall, count: int) -> list[inference_pb2.GenerateResponse]:
    """The next so many messages of request 7, whatever frames they come in."""
    found: list[inference_pb2.GenerateResponse] = []
    while len(found) < count:
        frame = await link.read()
        assert {reply.number for reply in frame.replies} == {7}
        found += [reply.response for reply in frame.replies]
    assert len(found) == count
    return found

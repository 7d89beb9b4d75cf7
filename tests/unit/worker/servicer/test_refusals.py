"""What cannot be served is refused, with words and numbers that tell the client what to change."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import grpc.aio
import numpy as np
import pytest

from radixfleet.channel import open_channel
from radixfleet.convert import pack_tokens
from radixfleet.errors import InvalidRequest, Unavailable
from radixfleet.status import error_from_rpc
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.answers import collect, generate, read_failure, request
from tests.support.byte_tokenizer import END_ID
from tests.support.fake_engine import FakeEngine
from tests.support.worker_fixture import sim_runner, sim_worker
from worker.app import Worker
from worker.metrics import Outcome

CONTEXT = 128
KV_TOKENS = 256


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with sim_worker(sim_runner(kv_tokens=KV_TOKENS, max_context_tokens=CONTEXT)) as running:
        yield running


async def refusal(stub: inference_pb2_grpc.InferenceStub, message: inference_pb2.GenerateRequest) -> InvalidRequest:
    kinds, error = await read_failure(stub.Generate(message))
    assert kinds == []
    assert isinstance(error, InvalidRequest)
    return error


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "field"),
    [
        (CONTEXT, None, "prompt"),
        (CONTEXT, 1, "prompt"),
        (CONTEXT + 1, 1, "prompt"),
        (CONTEXT - 1, 2, "sampling.max_new_tokens"),
        (10, 99_999_999, "sampling.max_new_tokens"),
        (10, 0, "sampling.max_new_tokens"),
        (10, 2**63, "sampling.max_new_tokens"),
    ],
)
async def test_what_the_context_cannot_hold_is_refused_with_the_numbers(
    stub: inference_pb2_grpc.InferenceStub, prompt_tokens: int, max_new_tokens: int | None, field: str
) -> None:
    """Behaviour 40: a clear INVALID_ARGUMENT; the next request is unaffected."""
    limits = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    error = await refusal(stub, request([7] * prompt_tokens, **limits))
    assert error.field == field
    if max_new_tokens not in (0, 2**63):
        assert str(prompt_tokens) in str(error)
        assert str(CONTEXT) in str(error), "the limit that binds"
        assert error.metadata["max_context_tokens"] == str(CONTEXT)
    assert (await generate(stub, [7], max_new_tokens=3, ignore_eos=True)).reason == "LENGTH"


async def test_what_just_fits_the_context_is_served(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Behaviour 40: a prompt one short of the context gets one token; an unset limit means what the context leaves."""
    answer = await generate(stub, [7] * (CONTEXT - 1), ignore_eos=True)
    assert (len(answer.token_ids), answer.reason) == (1, "LENGTH")
    answer = await generate(stub, [8] * 28, max_new_tokens=100, ignore_eos=True)
    assert (len(answer.token_ids), answer.reason) == (100, "LENGTH")
    answer = await generate(stub, [9] * 28, ignore_eos=True)
    assert len(answer.token_ids) == 100, "the default of 256 is cut to what the context leaves"


async def test_what_the_kv_pool_cannot_hold_is_refused() -> None:
    async with (
        sim_worker(sim_runner(kv_tokens=KV_TOKENS, max_context_tokens=4096)) as worker,
        open_channel(worker.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        error = await refusal(stub, request([7] * (KV_TOKENS + 1), max_new_tokens=1))
        assert str(KV_TOKENS) in str(error)
        assert (await generate(stub, [7] * 10, ignore_eos=True)).reason == "LENGTH"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (inference_pb2.Prompt(), "prompt"),
        (inference_pb2.Prompt(text=""), "prompt"),
        (inference_pb2.Prompt(token_ids=inference_pb2.TokenIds()), "prompt.token_ids"),
        (inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[1], packed=b"\0\0\0\0")), "prompt.token_ids"),
        (inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(packed=b"\0\0\0")), "prompt.token_ids.packed"),
        (inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[257])), "prompt"),
        (inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[2**32 - 1])), "prompt"),
        (inference_pb2.Prompt(chat=inference_pb2.Chat()), "prompt.chat.messages"),
    ],
)
async def test_a_prompt_that_is_none_is_refused(
    stub: inference_pb2_grpc.InferenceStub, prompt: inference_pb2.Prompt, field: str
) -> None:
    """Behaviour 40: empty in any form, or with ids that the model does not have."""
    assert (await refusal(stub, inference_pb2.GenerateRequest(prompt=prompt))).field == field


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
async def test_numbers_that_are_none_are_refused(
    stub: inference_pb2_grpc.InferenceStub, name: str, value: float
) -> None:
    """Behaviour 34: protobuf carries NaN and infinity; the field is named."""
    assert (await refusal(stub, request("x", **{name: value}))).field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_k": -2}, "sampling.top_k"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "sampling.min_new_tokens"),
        ({"min_new_tokens": 2**64 - 1}, "sampling.min_new_tokens"),
        ({"stop": [""]}, "sampling.stop[0]"),
        ({"stop": [str(i) for i in range(17)]}, "sampling.stop"),
        ({"stop": ["x" * 1025]}, "sampling.stop[0]"),
        ({"stop_token_ids": [257]}, "sampling.stop_token_ids"),
        ({"request_id": "x" * 2000}, "request_id"),
    ],
)
async def test_absurd_parameters_are_refused(
    stub: inference_pb2_grpc.InferenceStub, fields: dict[str, object], field: str
) -> None:
    """Behaviour 34: each with its field."""
    assert (await refusal(stub, request("x", **fields))).field == field


async def test_more_tokens_than_the_context_leaves_cannot_be_the_least(stub: inference_pb2_grpc.InferenceStub) -> None:
    error = await refusal(stub, request("x", min_new_tokens=CONTEXT))
    assert str(CONTEXT) in str(error)


async def test_text_that_is_not_utf8_is_refused_by_name(
    channel: grpc.aio.Channel, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """Behaviour 42: protobuf refuses it before any servicer runs; the client still learns which field it was."""
    raw = channel.unary_stream(
        "/radixfleet.v1.Inference/Generate",
        request_serializer=lambda data: data,
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )
    for message, field in (
        (request("??"), "prompt.text"),
        (request("x", stop=["??"]), "sampling.stop[0]"),
        (request("x", cache_salt="??"), "cache_salt"),
    ):
        for bad in (b"\xff\xfe", b"\xed\xa0"):  # no UTF-8 at all; the beginning of a lone surrogate
            kinds, error = await read_failure(raw(message.SerializeToString().replace(b"??", bad)))
            assert kinds == []
            assert isinstance(error, InvalidRequest)
            assert error.field == field


async def test_a_prompt_of_a_million_tokens_is_refused_by_the_context_not_by_grpc(
    stub: inference_pb2_grpc.InferenceStub,
) -> None:
    """Behaviour 41: both forms of ids, text, and a big answer: gRPC's 4 MiB are not what says no."""
    ids = np.full(1_200_000, 200, dtype=np.uint32)
    packed = pack_tokens(ids)
    plain = inference_pb2.TokenIds(ids=ids.tolist())
    for prompt in (inference_pb2.Prompt(token_ids=packed), inference_pb2.Prompt(token_ids=plain)):
        error = await refusal(stub, inference_pb2.GenerateRequest(prompt=prompt))
        assert str(len(ids)) in str(error)
        assert str(CONTEXT) in str(error)
    long_text = inference_pb2.DetokenizeRequest(token_ids=[END_ID] * 700_000, skip_special_tokens=False)
    assert len((await stub.Detokenize(long_text)).text) == 700_000 * len("<|end|>")


async def test_a_prompt_of_a_million_tokens_is_served_where_it_fits() -> None:
    """Behaviour 41: the other direction."""
    tokens = 1_000_000
    runner = sim_runner(kv_tokens=1_000_448, verify=False, chunked_prefill_size=65_536)
    async with sim_worker(runner) as worker, open_channel(worker.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answer = await generate(stub, np.arange(tokens) % 256, max_new_tokens=2, ignore_eos=True)
    assert answer.started.prompt_tokens == tokens
    assert answer.reason == "LENGTH"


async def test_no_request_is_taken_before_the_engine_is_ready() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        _, error = await read_failure(stub.Generate(request("x")))
        assert isinstance(error, Unavailable)
        assert "loading" in str(error)
        assert error.retry_after_s == 1.0
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        assert isinstance(error_from_rpc(failure.value), Unavailable)
        tokenized = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(text="x")))
        assert list(tokenized.token_ids) == [ord("x")], "needs no engine"

        engine.become_ready()
        engine.crash()
        _, error = await read_failure(stub.Generate(request("x")))
        assert isinstance(error, Unavailable)
        assert "failed" in str(error)
        name = "radixfleet_worker_requests_total"
        assert worker.metrics.registry.get_sample_value(name, {"outcome": Outcome.UNAVAILABLE.value}) == 2


async def test_a_stream_ends_with_unavailable_when_the_engine_dies() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request("x"))
        await call.initial_metadata()
        uid = engine.submits[0].uid
        engine.admit(uid)
        engine.output(uid, ord("a"))
        engine.crash()
        kinds, error = await read_failure(call)
        assert kinds == ["started", "delta"]
        assert isinstance(error, Unavailable)
        engine.restart()
        engine.become_ready()
        again = stub.Generate(request("x"))
        await again.initial_metadata()
        engine.crash()
        await read_failure(again)


async def test_refusals_are_counted_apart(worker: Worker, stub: inference_pb2_grpc.InferenceStub) -> None:
    """Behaviour 58: refused is neither a success nor a failure of ours."""
    await refusal(stub, request("x", top_k=-5))
    value = worker.metrics.registry.get_sample_value
    assert value("radixfleet_worker_requests_total", {"outcome": "refused"}) == 1
    assert value("radixfleet_worker_requests_total", {"outcome": "failed"}) == 0
    await collect(stub.Generate(request("x", max_new_tokens=1)))

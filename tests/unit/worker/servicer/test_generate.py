"""Generate over real gRPC, against the real scheduler and cache and a simulated runner."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from weakref import ref

import grpc.aio
import pytest

from radixfleet import blocks
from radixfleet.channel import open_channel
from radixfleet.errors import InternalError, InvalidRequest, UnknownModel
from radixfleet.output_text.output import OutputText
from radixfleet.status import error_from_rpc
from radixfleet.text import Tokenizer
from radixfleet.types import FinishReason
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.answers import collect, generate, read_failure, request
from tests.support.byte_tokenizer import END_ID, byte_spec
from tests.support.fake_engine import FakeEngine
from tests.support.gated_executor import GatedExecutor
from tests.support.small_tokenizers import metaspace, spec_of
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.app import Worker
from worker.core.messages import Admitted, Output, StepOutputs
from worker.metrics import Outcome
from worker.servicer.generation import Generation
from worker.servicer.grammars import Grammars
from worker.servicer.intake import Intake


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with sim_worker() as running:
        yield running


async def test_a_stream_is_started_then_deltas_then_finished(
    worker: Worker, stub: inference_pb2_grpc.InferenceStub
) -> None:
    call = stub.Generate(request("hello", request_id="mine", max_new_tokens=20, ignore_eos=True))
    metadata = dict(await call.initial_metadata())
    answer = await collect(call)
    assert answer.started.request_id == "mine"
    assert answer.started.execution_id == metadata["radixfleet-execution-id"]
    assert answer.started.worker_id == worker.description.worker_id
    assert answer.started.prompt_tokens == 5
    assert (answer.reason, len(answer.token_ids)) == ("LENGTH", 20)
    usage = answer.finished.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (5, 0, 20)
    assert usage.prefill_s > 0
    assert usage.decode_s > 0


async def test_the_text_is_the_decoding_of_the_tokens(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Behaviour 36: random bytes as tokens: whatever is split where, the joined deltas equal the full decode."""
    tokenizer = Tokenizer(byte_spec())
    for prompt in ("a", "b", "c"):
        answer = await generate(stub, prompt, max_new_tokens=300, ignore_eos=True)
        assert answer.text == tokenizer.decode(answer.token_ids)


async def test_tokens_of_one_engine_step_come_in_one_delta() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("hello"))
        await until(lambda: len(engine.submits) == 1)
        uid = engine.submits[0].uid
        engine.admit(uid, cached_tokens=3)
        engine.output(uid, *b"abc")
        engine.end(uid, FinishReason.LENGTH)
        answer = await collect(call)
    assert [(list(delta.token_ids), delta.text) for delta in answer.deltas] == [([97, 98, 99], "abc")]
    assert answer.started.cached_tokens == answer.finished.usage.cached_tokens == 3


async def test_the_second_turn_finds_the_first_answer_cached(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Behaviour 26: cached_tokens of the next turn include the generated tokens, to the last whole page."""
    prompt = list(b"system: be brief\nuser: hello\nassistant: ")
    first = await generate(stub, prompt, max_new_tokens=100, ignore_eos=True)
    conversation = [*prompt, *first.token_ids]
    second = await generate(stub, [*conversation, *b"\nuser: more\n"], max_new_tokens=1)
    # The KV of the last token was never computed.
    assert second.started.cached_tokens == (len(conversation) - 1) // 16 * 16 > len(prompt)


async def test_requests_of_another_salt_share_no_prefix(stub: inference_pb2_grpc.InferenceStub) -> None:
    prompt = list(range(200))
    await generate(stub, prompt, max_new_tokens=1, cache_salt="one")
    assert (await generate(stub, prompt, max_new_tokens=1, cache_salt="two")).started.cached_tokens == 0
    assert (await generate(stub, prompt, max_new_tokens=1, cache_salt="one")).started.cached_tokens == 192


async def test_a_stop_string_ends_the_generation_and_is_not_in_the_text(
    worker: Worker, stub: inference_pb2_grpc.InferenceStub
) -> None:
    """Behaviour 37: streamed text = unstreamed text before the stop string; tokens up to the one that completed it."""
    whole = await generate(stub, "tell", max_new_tokens=300, ignore_eos=True)
    stop = next(whole.text[at : at + 3] for at in range(60, 300) if "\ufffd" not in whole.text[at : at + 3])
    answer = await generate(stub, "tell", max_new_tokens=300, ignore_eos=True, stop=["never there", stop])
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert (answer.reason, answer.finished.matched_stop) == ("STOP", stop)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    tokenizer = Tokenizer(byte_spec())
    assert stop in tokenizer.decode(answer.token_ids)
    assert stop not in tokenizer.decode(answer.token_ids[:-1])
    assert answer.finished.usage.completion_tokens == len(answer.token_ids) < 300
    await until(lambda: worker.engine.num_open == 0)


async def test_tokens_that_came_with_the_stop_string_but_after_it_do_not_count() -> None:
    """Behaviour 37: also when one message of the engine brings them all."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("hello", stop=["XY"]))
        await until(lambda: len(engine.submits) == 1)
        uid = engine.submits[0].uid
        engine.admit(uid)
        engine.output(uid, *b"abXYcd")
        answer = await collect(call)
    assert (bytes(answer.token_ids), answer.text, answer.reason) == (b"abXY", "ab", "STOP")
    assert answer.finished.usage.completion_tokens == 4
    assert engine.aborted_uids == [uid]


async def test_nothing_follows_the_end_although_a_step_was_in_flight(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Behaviour 4: step N+1 is launched before it is known that step N ends the request; its token is never sent."""
    whole = await generate(stub, "go on", max_new_tokens=200, ignore_eos=True)
    stop_id = whole.token_ids[40]
    end = whole.token_ids.index(stop_id) + 1
    answer = await generate(stub, "go on", max_new_tokens=200, ignore_eos=True, stop_token_ids=[stop_id])
    assert answer.token_ids == whole.token_ids[:end]
    assert (answer.reason, answer.finished.matched_token_id) == ("STOP", stop_id)
    assert answer.text == Tokenizer(byte_spec()).decode(whole.token_ids[: end - 1]), "the stop token is not in the text"


async def test_requests_with_different_options_do_not_mix(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Behaviour 38: in one batch, each request is decoded and stopped as it asked for."""
    whole = await generate(stub, "mix", max_new_tokens=500, ignore_eos=True)
    assert END_ID in whole.token_ids, "the vocabulary is small enough for the special token to come up"
    text = Tokenizer(byte_spec()).decode(whole.token_ids)
    stop = next(text[at : at + 2] for at in range(30, 300) if "\ufffd" not in text[at : at + 2])
    hidden, shown, stopped, ended = await asyncio.gather(
        generate(stub, "mix", max_new_tokens=500, ignore_eos=True),
        generate(stub, "mix", max_new_tokens=500, ignore_eos=True, skip_special_tokens=False),
        generate(stub, "mix", max_new_tokens=500, ignore_eos=True, stop=[stop]),
        generate(stub, "mix", max_new_tokens=500),
    )
    assert hidden.text == text
    assert shown.text == Tokenizer(byte_spec()).decode(whole.token_ids, skip_special_tokens=False) != text
    assert stopped.text == text[: text.index(stop)]
    assert (ended.finished.matched_token_id, ended.token_ids[-1]) == (END_ID, END_ID)
    assert len(ended.token_ids) == whole.token_ids.index(END_ID) + 1


@pytest.mark.parametrize("shown", [False, True])
async def test_a_stop_string_that_is_a_special_token_stops_though_it_is_not_shown(
    stub: inference_pb2_grpc.InferenceStub, *, shown: bool
) -> None:
    """As a string, which min_new_tokens does not forbid. Where special tokens are shown, it is found in the text."""
    whole = await generate(stub, "mix", max_new_tokens=500, ignore_eos=True)
    end = whole.token_ids.index(END_ID)
    options = {"max_new_tokens": 500, "min_new_tokens": 500, "ignore_eos": True, "skip_special_tokens": not shown}
    answer = await generate(stub, "mix", stop=["<|end|>", "no token"], **options)
    assert (answer.reason, answer.finished.matched_stop) == ("STOP", "<|end|>")
    assert answer.token_ids == whole.token_ids[: end + 1]
    assert answer.text == Tokenizer(byte_spec()).decode(whole.token_ids[:end])


async def test_a_seed_gives_the_same_tokens_again(stub: inference_pb2_grpc.InferenceStub) -> None:
    sampled = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
    one, again = [await generate(stub, "dice", seed=7, **sampled) for _ in range(2)]
    other = await generate(stub, "dice", seed=8, **sampled)
    unseeded = [(await generate(stub, "dice", **sampled)).token_ids for _ in range(2)]
    assert one.token_ids == again.token_ids != other.token_ids
    assert unseeded[0] != unseeded[1]


async def test_a_chat_is_laid_out_by_the_template(stub: inference_pb2_grpc.InferenceStub) -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    prompt = inference_pb2.Prompt(chat=chat)
    tokenized = await stub.Tokenize(inference_pb2.TokenizeRequest(prompt=prompt))
    assert bytes(tokenized.token_ids) == b"user: hi\nassistant: "
    sampling = inference_pb2.SamplingParams(max_new_tokens=1)
    answer = await collect(stub.Generate(inference_pb2.GenerateRequest(prompt=prompt, sampling=sampling)))
    assert answer.started.prompt_tokens == len(tokenized.token_ids)


async def test_detokenize_turns_ids_into_text(stub: inference_pb2_grpc.InferenceStub) -> None:
    ids = [*"né".encode(), END_ID]
    hidden = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
    shown = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False))
    assert (hidden.text, shown.text) == ("né", "né<|end|>")
    assert (await stub.Detokenize(inference_pb2.DetokenizeRequest())).text == ""


async def test_the_model_is_asked_for_by_name(worker: Worker, stub: inference_pb2_grpc.InferenceStub) -> None:
    assert (await generate(stub, "x", model="sim-model", max_new_tokens=1)).reason == "LENGTH"
    calls = [
        collect(stub.Generate(request("x", model="another"))),
        stub.Tokenize(inference_pb2.TokenizeRequest(model="another", prompt=inference_pb2.Prompt(text="x"))),
        stub.Detokenize(inference_pb2.DetokenizeRequest(model="another", token_ids=[1])),
        stub.GetModelInfo(inference_pb2.GetModelInfoRequest(model="another")),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        error = error_from_rpc(failure.value)
        assert isinstance(error, UnknownModel)
        assert str(error) == "no model is called 'another'; served are sim-model"


async def test_model_info_tells_the_limits(stub: inference_pb2_grpc.InferenceStub) -> None:
    info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert info.model == "sim-model"
    assert info.max_context_tokens == 65_536
    assert info.vocab_size == 257
    assert list(info.eos_token_ids) == [END_ID]
    assert info.has_chat_template
    assert info.tokenizer_fingerprint == byte_spec().fingerprint()


async def test_prefixes_are_named_as_the_router_names_them() -> None:
    """The engine gets the namespace from which the router computes its block hashes."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request("x", cache_salt="tenant", priority=3))
        await until(lambda: len(engine.submits) == 1)
        submit = engine.submits[0]
        assert submit.namespace == blocks.namespace("sim-model", "tenant")
        assert submit.priority == 3
        call.cancel()


async def test_tokenizing_holds_up_nobody_else() -> None:
    """Behaviour 59: text is tokenized on threads; while they are all busy, requests with token ids are served."""
    engine, threads = FakeEngine(), GatedExecutor()
    async with sim_worker(engine=engine, serving=False) as worker:
        engine.become_ready()
        intake = Intake("sim-model", Tokenizer(byte_spec()), threads, Grammars(engine, None), default_max_new_tokens=16)
        text = request("text", stop=["y"])
        chat = inference_pb2.GenerateRequest()
        chat.prompt.chat.messages.add(role="user", content="text")
        many_ids = request([1] * 500)
        many_ids.prompt.token_ids.packed *= 100
        ready = worker.requests.require_serving()
        slow = [asyncio.create_task(intake.prepare(message, ready)) for message in (text, chat, many_ids)]
        await until(lambda: len(threads.waiting) == len(slow))
        quick = await intake.prepare(request([1, 2, 3]), ready)
        assert quick.tokens.tolist() == [1, 2, 3]
        assert not any(task.done() for task in slow)
        threads.release()
        assert (await slow[0]).tokens.tolist() == list(b"text")
        assert (await slow[1]).tokens.tolist() == list(b"user: text\nassistant: ")
        with pytest.raises(InvalidRequest, match="50000"):
            await slow[2]


async def test_an_answer_goes_on_with_the_text_of_its_prompt() -> None:
    """Also by a SentencePiece vocabulary, whose first word has no space before it."""
    tokenizer, engine = Tokenizer(spec_of(metaspace("first"))), FakeEngine()
    prompt, answer = tokenizer.encode("the").tolist(), tokenizer.encode("a brown").tolist()[2:]
    intake = Intake("sim-model", tokenizer, GatedExecutor(), Grammars(engine, None), default_max_new_tokens=9)
    async with sim_worker(engine=engine, serving=False) as worker:
        engine.become_ready()
        prepared = await intake.prepare(request(prompt), worker.requests.require_serving())
    assert tokenizer.decode(answer) == "brown"
    assert "".join(map(prepared.texts[0].push, answer)) + prepared.texts[0].finish() == " brown"


async def test_a_failure_of_the_engine_ends_the_stream_with_its_error() -> None:
    """Tokens that came before the failure are delivered; a failed request never looks finished."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("x"))
        await until(lambda: len(engine.submits) == 1)
        uid = engine.submits[0].uid
        engine.admit(uid)
        engine.output(uid, *b"ab")
        engine.end(uid, None, code="INTERNAL", message="the logits hold a NaN")
        kinds, error = await read_failure(call)
    assert kinds == ["started", "delta"]
    assert (type(error), str(error)) == (InternalError, "the logits hold a NaN")


async def test_a_fault_in_one_answer_ends_that_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have tokens in the same step; the engine is told of the one that is given up."""
    push = OutputText.push

    def faulty(self: OutputText, token_id: int) -> str:
        return push(self, token_id) if token_id != ord("!") else str(1 // 0)

    monkeypatch.setattr(OutputText, "push", faulty)
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        stub = inference_pb2_grpc.InferenceStub(channel)
        faulted, whole = (stub.Generate(request(prompt, ignore_eos=True)) for prompt in ("first", "second"))
        await faulted.initial_metadata()
        await whole.initial_metadata()
        lengths = {len(submit.token_ids): submit.uid for submit in engine.submits}
        first, second = lengths[len("first")], lengths[len("second")]
        admitted = [Admitted(first, 0, 0.0), Admitted(second, 0, 0.0)]
        engine._hear(StepOutputs(admitted, [Output(first, ord("!")), Output(second, ord("b"))], []))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(faulted)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert engine.aborted_uids == [first]
        engine.end(second, FinishReason.LENGTH)
        assert (await collect(whole)).text == "b"


async def test_a_request_that_is_over_leaves_nothing_to_the_collector(stub: inference_pb2_grpc.InferenceStub) -> None:
    gc.collect()
    gc.disable()
    try:
        await generate(stub, "hello", max_new_tokens=20, ignore_eos=True)
        await until(lambda: not any(type(kept) is Generation for kept in gc.get_objects()))
    finally:
        gc.enable()


async def test_a_request_whose_engine_died_leaves_nothing_to_the_collector() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker:
        engine.become_ready()
        intake = Intake(
            "sim-model", Tokenizer(byte_spec()), GatedExecutor(), Grammars(engine, None), default_max_new_tokens=9
        )
        ready = worker.requests.require_serving()
        prepared = [await intake.prepare(request([1]), ready) for _ in range(2)]
        gc.collect()
        gc.disable()
        try:
            generations = [worker.requests.start(request([1]), each, arrived_s=0.0) for each in prepared]
            engine.crash()
            kept = [ref(generation) for generation in generations]
            while generations:
                worker.requests.end(generations.pop(), Outcome.CANCELLED)
            assert [each() for each in kept] == [None, None]
        finally:
            gc.enable()

"""The worker as a gateway of SGLang's dialect sees it: what such a gateway does, call by call."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import tokenizers
import transformers
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from radixfleet.channel import open_channel
from radixfleet.grpc_guard import door_of
from radixfleet.guard import Door
from radixfleet.text import Tokenizer
from radixfleet.types import ChatMessage, ChatPrompt
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.answers import generate
from tests.support.byte_tokenizer import END_ID, byte_spec
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.app import Worker
from worker.dialects import sglang
from worker.dialects.sglang_requests import generate_request
from worker.dialects.tokenizer_archive import tokenizer_archive

pb = sglang_scheduler_pb2


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with sim_worker() as running:
        yield running


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)


def request(token_ids: list[int], *, stream: bool = True, **fields: Any) -> Any:
    """As a gateway sends it, with every default spelled out. `fields`: of GenerateRequest, or of SamplingParams."""
    own = {name: fields.pop(name) for name in list(fields) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "n": 1,
        "max_new_tokens": 8,
        "skip_special_tokens": True,
    }
    return pb.GenerateRequest(
        **({"request_id": "r", "logprob_start_len": -1} | own),
        tokenized=pb.TokenizedInput(input_ids=token_ids),
        sampling_params=pb.SamplingParams(**(sampling | fields)),
        stream=stream,
    )


class Read:
    """One whole answer, its rules checked: cumulative counts, one `complete` an index, chunks that join to it."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.completes: dict[int, Any] = {}

    @classmethod
    async def all_of(cls, call: Any) -> Read:
        read = cls()
        streamed: dict[int, list[int]] = {}
        async for response in call:
            if response.WhichOneof("response") == "chunk":
                chunk = response.chunk
                assert chunk.index not in read.completes
                streamed.setdefault(chunk.index, []).extend(chunk.token_ids)
                assert chunk.completion_tokens == len(streamed[chunk.index])
                read.chunks.append(chunk)
            else:
                complete = response.complete
                assert complete.index not in read.completes
                assert complete.completion_tokens == len(complete.output_ids)
                read.completes[complete.index] = complete
        for index, tokens in streamed.items():
            assert tokens == list(read.completes[index].output_ids)
        return read

    @property
    def only(self) -> Any:
        (complete,) = self.completes.values()
        return complete


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), caught.value.details() or ""


async def test_is_found_to_speak_this_dialect_and_no_other(channel: grpc.aio.Channel, stub: Any) -> None:
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Embed(pb.EmbedRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_tells_what_it_serves(stub: Any) -> None:
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length, info.vocab_size) == ("sim-model", 65_536, END_ID + 1)
    assert (list(info.eos_token_ids), info.is_generation) == ([END_ID], True)
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.max_total_num_tokens == 65_536
    assert server.server_args["page_size"] == 16
    loads = await stub.GetLoads(pb.GetLoadsRequest(include=["core", "disagg", "queues", "memory"]))
    (load,) = loads.loads
    assert (load.num_total_reqs, load.max_running_requests, load.max_total_num_tokens) == (0, 32, 65_536)


async def test_is_not_healthy_while_it_loads() -> None:
    """Behaviour 60: health is real."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as loading, open_channel(loading.address) as channel:
        stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)
        assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        engine.become_ready()
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_streams_the_tokens_that_our_own_service_gives(channel: grpc.aio.Channel, stub: Any) -> None:
    prompt = list(range(200))
    ours = await generate(inference_pb2_grpc.InferenceStub(channel), prompt, max_new_tokens=8)
    read = await Read.all_of(stub.Generate(request(prompt)))
    complete = read.only
    assert list(complete.output_ids) == ours.token_ids
    assert (complete.finish_reason, complete.prompt_tokens, complete.cached_tokens) == ("length", 200, 192)
    assert read.chunks[0].cached_tokens == 192


async def test_without_streaming_one_message_has_it_all(stub: Any) -> None:
    read = await Read.all_of(stub.Generate(request([1, 2, 3], stream=False)))
    assert (read.chunks, read.only.completion_tokens) == ([], 8)


async def test_many_completions_come_in_one_call(stub: Any) -> None:
    """Behaviour 43: n = 4 gives four distinct indices."""
    read = await Read.all_of(stub.Generate(request([1, 2, 3], n=4, temperature=1.0)))
    assert sorted(read.completes) == [0, 1, 2, 3]
    assert len({tuple(complete.output_ids) for complete in read.completes.values()}) == 4


async def test_stops_at_tokens_and_at_strings(channel: grpc.aio.Channel, stub: Any) -> None:
    inference = inference_pb2_grpc.InferenceStub(channel)
    whole = await generate(inference, [5, 6], max_new_tokens=8)
    third = whole.token_ids[2]
    by_token = (await Read.all_of(stub.Generate(request([5, 6], stop_token_ids=[third])))).only
    assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", third)
    assert list(by_token.output_ids) == whole.token_ids[: whole.token_ids.index(third) + 1]
    text = whole.text[2:4]
    by_text = (await Read.all_of(stub.Generate(request([5, 6], stop=[text])))).only
    assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", text)


async def test_log_probabilities_of_answer_and_prompt(stub: Any) -> None:
    wanted = {"return_logprob": True, "top_logprobs_num": 2}
    read = await Read.all_of(stub.Generate(request([1, 2, 3, 4], logprob_start_len=0, **wanted)))
    complete = read.only
    assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)
    assert len(complete.output_logprobs.token_logprobs) == 8
    assert [len(top.values) for top in complete.output_logprobs.top_logprobs] == [2] * 8
    given = complete.input_logprobs
    assert list(given.token_ids) == [1, 2, 3, 4]
    assert [each.HasField("value") for each in given.token_logprobs] == [False, True, True, True]
    assert [len(top.values) for top in given.top_logprobs] == [0, 2, 2, 2]
    assert read.chunks[0].HasField("input_logprobs")
    later = (await Read.all_of(stub.Generate(request([1, 2, 3, 4], logprob_start_len=2, **wanted)))).only
    assert list(later.input_logprobs.token_ids) == [3, 4]
    assert list(later.input_logprobs.token_logprobs) == list(given.token_logprobs)[2:]
    none = (await Read.all_of(stub.Generate(request([1, 2, 3, 4], **wanted)))).only
    assert not none.HasField("input_logprobs")


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def played(engine: FakeEngine) -> AsyncIterator[Worker]:
    """Its answers go on until they are ended."""
    async with sim_worker(engine=engine, serving=False) as running:
        engine.become_ready()
        yield running
        await until(lambda: not len(running.requests))


async def test_a_client_that_goes_away_is_aborted_by_its_id(played: Worker, engine: FakeEngine) -> None:
    """Behaviours 6 and 7: the call is not cancelled, an abort comes instead; ids match exactly."""
    async with open_channel(played.address) as channel:
        stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)
        calls = {}
        for uid, name in enumerate(("a-1", "a-10"), start=1):
            calls[name] = stub.Generate(request([1, 2], request_id=name))
            await until(lambda uid=uid: len(engine.submits) == uid)
            engine.admit(uid)
            engine.output(uid, 7)
            assert (await calls[name].read()).WhichOneof("response") == "chunk"
        assert (await stub.Abort(pb.AbortRequest(request_id="a-1"))).success
        ended = await calls["a-1"].read()
        assert (ended.complete.finish_reason, list(ended.complete.output_ids)) == ("abort", [7])
        assert await calls["a-1"].read() is grpc.aio.EOF
        assert engine.aborted_uids == [1]
        assert (await stub.Abort(pb.AbortRequest(request_id="a-1"))).success, "known no longer: no error"
        assert (await stub.Abort(pb.AbortRequest(request_id="never"))).success
        assert engine.aborted_uids == [1]
        calls["a-10"].cancel()
        await until(lambda: engine.aborted_uids == [1, 2])


async def test_requests_in_the_queue_and_with_one_id_are_aborted_too(played: Worker, engine: FakeEngine) -> None:
    """Behaviour 5."""
    async with open_channel(played.address) as channel:
        stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)
        calls = [stub.Generate(request([1, 2], request_id="same")) for _ in range(4)]
        await until(lambda: len(engine.submits) == 4)
        engine.admit(1)
        await stub.Abort(pb.AbortRequest(request_id="same"))
        assert [(await call.read()).complete.finish_reason for call in calls] == ["abort"] * 4


async def test_a_request_that_is_still_being_read_is_aborted_too(
    played: Worker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behaviour 5: large ones are read beside the event loop."""
    reading, aborted = threading.Event(), threading.Event()

    def read(given: Any) -> inference_pb2.GenerateRequest:
        reading.set()
        assert aborted.wait(10)
        return generate_request(given)

    monkeypatch.setattr(sglang, "generate_request", read)
    monkeypatch.setattr(sglang, "_CHEAP_BYTES", 0)
    async with open_channel(played.address) as channel:
        stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)
        call = stub.Generate(request([1, 2], request_id="large"))
        await until(reading.is_set)
        answer = await stub.Abort(pb.AbortRequest(request_id="large"))
        aborted.set()
        assert (await call.read()).complete.finish_reason == "abort"
        assert answer.message == ""


async def test_a_cancelled_call_ends_its_request(played: Worker, engine: FakeEngine) -> None:
    async with open_channel(played.address) as channel:
        call = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel).Generate(request([1, 2], stream=False))
        await until(lambda: len(engine.submits) == 1)
        engine.admit(1)
        engine.output(1, 7)
        call.cancel()
        await until(lambda: engine.aborted_uids == [1])


@pytest.mark.parametrize(
    ("token_ids", "fields", "field"),
    [
        ([], {}, "tokenized.input_ids"),
        ([END_ID + 1], {}, "prompt"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"n": 1 << 31}, "n"),
        ([1], {"top_p": -1.0}, "top_p"),
        ([1], {"structural_tag": "{}"}, "structural_tag"),
        ([1], {"ebnf_grammar": "root ::= ("}, "ebnf_grammar"),
        ([1], {"ebnf_grammar": "x" * 300_000}, "ebnf_grammar"),
        ([1], {"logit_bias": {"seven": 1.0}}, "logit_bias"),
        ([1], {"max_new_tokens": 99_999_999}, "max_new_tokens"),
        ([1], {"lora_id": "adapter"}, "lora_id"),
        ([1], {"return_hidden_states": True}, "return_hidden_states"),
        ([1], {"input_embeds": [0.5]}, "input_embeds"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    stub: Any, token_ids: list[int], fields: dict[str, Any], field: str
) -> None:
    """Behaviours 34 and 40, on this entry."""
    code, message = await failure(stub.Generate(request(token_ids, **fields)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in message


async def test_parameters_that_are_not_set_have_their_defaults(stub: Any) -> None:
    bare = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[1, 2]), sampling_params=pb.SamplingParams(max_new_tokens=3)
    )
    assert (await Read.all_of(stub.Generate(bare))).only.completion_tokens == 3


async def test_the_tokenizer_comes_in_small_chunks_with_a_digest(stub: Any) -> None:
    chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert all(len(chunk.data) <= 64 * 1024 for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert data == tokenizer_archive(byte_spec(), max_context_tokens=65_536), "equal specs give equal bytes"


def test_the_archive_makes_the_tokenizer_that_the_worker_has(tmp_path: Path) -> None:
    spec = byte_spec()
    with zipfile.ZipFile(io.BytesIO(tokenizer_archive(spec, max_context_tokens=100))) as archive:
        archive.extractall(tmp_path)
    ours = Tokenizer(spec)
    prompt = ChatPrompt((ChatMessage("user", "héllo"), ChatMessage("assistant", "yes")))
    rendered = ours.render_chat(prompt)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert plain.encode(rendered, add_special_tokens=False).ids == ours.encode_prompt(prompt).tolist()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": message.role, "content": message.content} for message in prompt.messages]
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == rendered
    assert theirs.eos_token_id == END_ID
    config = json.loads((tmp_path / "generation_config.json").read_text())
    assert config["eos_token_id"] == [END_ID]


def test_a_model_without_a_chat_template_has_none_in_its_archive() -> None:
    with zipfile.ZipFile(io.BytesIO(tokenizer_archive(byte_spec(chat_template=None), max_context_tokens=9))) as archive:
        assert "chat_template.jinja" not in archive.namelist()
        assert "chat_template" not in json.loads(archive.read("tokenizer_config.json"))


@pytest.mark.parametrize(
    "method", [method.name for method in pb.DESCRIPTOR.services_by_name["SglangScheduler"].methods]
)
def test_a_guarded_worker_opens_the_whole_dialect_to_admins_alone(method: str) -> None:
    """KV events hold the tokens of everyone's prompts, and an abort knows no owner."""
    assert door_of(f"/sglang.grpc.scheduler.SglangScheduler/{method}") is Door.ADMIN

"""Engines that speak nothing but OpenAI's HTTP behind the router, played by a fake on a real port."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from radixfleet.answers import Delta, Finished, Started
from radixfleet.compose import generate_request
from radixfleet.convert import pack_tokens
from radixfleet.errors import InvalidRequest, Unavailable
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from router.app import running_router
from tests.support.engine_fleet import PROMPT, behind_router, model_directory, until_served_by
from tests.support.http_client import get
from tests.support.openai_engine import OpenAiEngine, letters
from tests.support.router_fixture import fake_worker, settings
from tests.support.waiting import until

# Without a tokenizer: text and chats go as they are.


async def test_text_without_a_tokenizer() -> None:
    engine = OpenAiEngine(owned_by="library", max_model_len=None)
    async with behind_router(engine) as fleet:
        events = [event async for event in fleet.client.generate("hello", max_new_tokens=6, temperature=0)]
        assert isinstance(events[0], Started)
        assert events[0].worker_id == engine.worker_id
        deltas = [event for event in events if isinstance(event, Delta)]
        assert "".join(delta.text for delta in deltas) == letters(5, 6)
        last = events[-1]
        assert isinstance(last, Finished)
        assert last.usage is not None
        assert (last.reason.value, last.usage.prompt_tokens, last.usage.completion_tokens) == ("length", 5, 6)
        [call] = engine.calls
        assert (call.path, call.prompt, call.body["max_tokens"]) == ("/v1/completions", "hello", 6)
        assert (call.body["temperature"], call.body["stream"]) == (0.0, True)
        assert call.body["stream_options"] == {"include_usage": True}


async def test_chats_without_a_tokenizer_go_through_as_messages() -> None:
    engine = OpenAiEngine(owned_by="library", max_model_len=None)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    earlier = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": earlier},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    async with behind_router(engine) as fleet:
        answer = await fleet.http("/v1/chat/completions", {"messages": messages, "tools": tools})
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == letters(4, 4)
        [call] = engine.calls
        assert call.path == "/v1/chat/completions"
        assert call.body["tools"] == tools
        assert "max_tokens" not in call.body, "the engine knows what its context leaves"
        sent = call.body["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
        assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern"}
        assert sent[2]["tool_call_id"] == "1"


async def test_calls_of_tools_and_reasoning_come_through() -> None:
    engine = OpenAiEngine(
        owned_by="library",
        thought="hm",
        reason="tool_calls",
        tool_calls=[("weather", '{"city": "Bern"}'), ("time", "{}")],
    )
    tools = [{"type": "function", "function": {"name": "weather"}}]
    async with behind_router(engine) as fleet:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 2}
        answer = await fleet.http("/v1/chat/completions", body)
        [choice] = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"].split("</think>")[1].strip() == letters(2, 2)
        called = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [(call["name"], json.loads(call["arguments"])) for call in called] == [
            ("weather", {"city": "Bern"}),
            ("time", {}),
        ]


async def test_what_needs_the_tokenizer_says_so() -> None:
    async with behind_router(OpenAiEngine()) as fleet:
        with pytest.raises(InvalidRequest, match="--tokenizers fake-model="):
            await fleet.client.tokenize("hello")
        with pytest.raises(InvalidRequest, match="--tokenizers fake-model="):
            await fleet.client.complete("hello", resume=True, temperature=0)
        answer = await fleet.http("/tokenize", {"prompt": "hello"})
        assert (answer.status, "--tokenizers" in answer.json["error"]["message"]) == (400, True)
        models = await get(fleet.router.http_port, "/v1/models")
        assert models.json["data"][0]["max_model_len"] == 4096


async def test_prefixes_of_texts_are_followed_without_a_tokenizer() -> None:
    first, second = OpenAiEngine(), OpenAiEngine()
    async with behind_router(first, second) as fleet:
        home = (await fleet.client.complete(PROMPT, max_new_tokens=1)).started.worker_id
        for number in range(6):
            done = await fleet.client.complete(f"{PROMPT}{number}", max_new_tokens=1)
            assert done.started.worker_id == home
            assert done.started.route is not None
            assert done.started.route.reason == "prefix"
            assert done.usage.cached_tokens >= len(PROMPT) // 16 * 16 - 16
        asked, actual = fleet.metric("prompt_tokens_asked_total"), fleet.metric("prompt_tokens_actual_total")
        assert asked == 6 * -(-(len(PROMPT) + 1) // 4), "the first one is not counted: the engine said nothing of it"
        assert 0.97 < actual / asked < 1.0, "what engines count in tokens of theirs is counted in ours"


async def test_a_chats_next_turn_goes_where_its_first_was() -> None:
    engines = OpenAiEngine(owned_by="library"), OpenAiEngine(owned_by="library")
    async with behind_router(*engines) as fleet:
        chat = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "one"}]
        home = (await fleet.client.complete(chat, max_new_tokens=2)).started.worker_id
        chat += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
        again = await fleet.client.complete(chat, max_new_tokens=2)
        assert again.started.worker_id == home


# With a tokenizer: of a worker of the same model, or one that is given.


async def test_beside_our_workers_engines_are_sent_the_same_token_ids() -> None:
    ours, engine = fake_worker("ours", max_context_tokens=4096), OpenAiEngine()
    async with behind_router(ours, engine) as fleet:
        served: dict[str, int] = {}
        for number in range(20):
            done = await fleet.client.complete(f"prompt {number}", max_new_tokens=2)
            served[done.started.worker_id] = served.get(done.started.worker_id, 0) + 1
        assert set(served) == {"ours", engine.worker_id}
        assert all(bytes(call.prompt).startswith(b"prompt ") for call in engine.calls)
        assert done.started.prompt_tokens == len("prompt 19")


async def test_a_tokenizer_that_is_given(tmp_path: Path) -> None:
    engine = OpenAiEngine(owned_by="vllm")
    given = f"fake-model={model_directory(tmp_path)}"
    async with behind_router(engine, tokenizers=(given,)) as fleet:
        chat = [{"role": "user", "content": "hi"}]
        done = await fleet.client.complete(chat, max_new_tokens=3)
        rendered = b"user: hi\nassistant: "
        assert bytes(engine.calls[0].prompt) == rendered
        assert done.started.prompt_tokens == len(rendered)
        assert bytes(done.token_ids).decode() == done.text == letters(len(rendered), 3)
        logprobs = await fleet.client.complete("abc", max_new_tokens=2, logprobs=2)
        assert [told.top for told in logprobs.choices[0].logprobs] == [
            ((5, -0.5), (100, -1.0)),
            ((5, -0.5), (101, -1.0)),
        ]
        info = await fleet.client.model_info()
        assert (info.has_chat_template, info.max_context_tokens) == (True, 4096)
        assert (await fleet.client.tokenize("hi")).tolist() == [104, 105]


async def test_a_tokenizer_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    for given in (f"m={tmp_path}", "m", "=x"):
        with pytest.raises(OSError, match="tokenizers"):
            async with running_router(settings(tokenizers=(given,))):
                pass


async def test_an_engine_that_takes_no_ids_is_sent_text_from_then_on(tmp_path: Path) -> None:
    engine = OpenAiEngine(owned_by="library", takes_ids=False)
    async with behind_router(engine, tokenizers=(f"fake-model={model_directory(tmp_path)}",)) as fleet:
        for _ in range(2):
            assert (await fleet.client.complete("hello", max_new_tokens=2)).text == letters(5, 2)
        chat = await fleet.client.complete([{"role": "user", "content": "hi"}], max_new_tokens=2)
        assert chat.text == letters(2, 2)
        assert [call.path for call in engine.calls] == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
        with pytest.raises(InvalidRequest, match="send text"):
            await fleet.client.complete([1, 2, 3], max_new_tokens=2)


async def test_an_engine_with_chats_alone_answers_chats(tmp_path: Path) -> None:
    engine = OpenAiEngine(owned_by="library", has_completions=False)
    async with behind_router(engine, tokenizers=(f"fake-model={model_directory(tmp_path)}",)) as fleet:
        chat = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            assert (await fleet.client.complete(chat, max_new_tokens=2)).text == letters(2, 2)
        with pytest.raises(Unavailable, match="does not know"):
            await fleet.client.complete("text", max_new_tokens=2)


async def test_an_answer_goes_on_elsewhere_where_the_engine_tells_token_ids() -> None:
    broken, good = OpenAiEngine(dies_after=2), fake_worker("ours", max_context_tokens=4096)
    async with behind_router(broken, good, policy="round_robin", retry_ratio=1.0) as fleet:
        await until_served_by(fleet, broken)
        done = await fleet.client.complete("hello", max_new_tokens=5, temperature=0, resume=True)
        begun = letters(5, 2).encode()
        assert bytes(done.token_ids[:2]) == begun
        assert bytes(good.calls[-1].request.generated.packed[::4]) == begun


@pytest.mark.parametrize(("limit", "num_tokens"), [({"max_new_tokens": 3}, 3), ({}, 256)])
async def test_an_answer_that_the_client_has_whole_is_not_asked_for(
    tmp_path: Path, limit: dict[str, int], num_tokens: int
) -> None:
    """Its worker was lost after the last token: the engine would have added one more."""
    engine = OpenAiEngine()
    request = generate_request(list(b"hello" * 20), {"temperature": 0, **limit})
    request.generated.CopyFrom(pack_tokens(np.full(num_tokens, 97, dtype=np.uint32)))
    async with (
        behind_router(engine, tokenizers=(f"fake-model={model_directory(tmp_path)}",)) as fleet,
        grpc.aio.insecure_channel(fleet.router.address) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        *_, last = [message async for message in call]
        assert last.finished.reason == inference_pb2.FINISH_REASON_LENGTH
        assert last.finished.usage.completion_tokens == num_tokens
        assert not engine.calls
        assert fleet.router.sketch.num_blocks == 0


# Parameters.


async def test_parameters_are_sent_in_the_words_of_each_kind() -> None:
    asked: dict[str, Any] = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "seed": 2**40 + 7}
    expected = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "seed": 7}
    for owner, penalty in (
        ("vllm", "repetition_penalty"),
        ("sglang", "repetition_penalty"),
        ("llamacpp", "repeat_penalty"),
    ):
        engine = OpenAiEngine(owned_by=owner)
        async with behind_router(engine) as fleet:
            await fleet.client.complete("hello", max_new_tokens=2, stop=["zz"], frequency_penalty=0.5, **asked)
            body = engine.calls[0].body
            assert {name: body[name] for name in expected} == expected
            assert (body[penalty], body["stop"], body["frequency_penalty"]) == (1.1, ["zz"], 0.5)
            assert body.get("repeat_last_n") == (-1 if owner == "llamacpp" else None)


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp"])
async def test_an_engines_own_defaults_are_switched_off(owner: str) -> None:
    """llama.cpp's are top_k 40 and min_p 0.05, and vLLM takes those of the model's authors: an answer would depend on
    where it is made."""
    engine = OpenAiEngine(owned_by=owner)
    async with behind_router(engine) as fleet:
        await fleet.client.complete("hello", max_new_tokens=2)
        body = engine.calls[0].body
        penalty = "repeat_penalty" if owner == "llamacpp" else "repetition_penalty"
        assert (body["top_k"], body["min_p"], body[penalty]) == (-1, 0.0, 1.0)
        assert "repeat_last_n" not in body


@pytest.mark.parametrize(("meta", "context"), [({"n_ctx": 2048}, 2048), ({"n_ctx": "?"}, 0), ("?", 0), ({}, 0)])
async def test_the_context_of_llama_cpps_slots_is_the_models(meta: Any, context: int) -> None:
    async with behind_router(OpenAiEngine(owned_by="llamacpp", max_model_len=None, meta=meta)) as fleet:
        assert (await fleet.client.model_info()).max_context_tokens == context


async def test_what_an_engine_does_not_know_is_refused_with_its_name() -> None:
    async with behind_router(OpenAiEngine(owned_by="library")) as fleet:
        for name, value in (("top_k", 3), ("ignore_eos", True), ("min_new_tokens", 2), ("stop_token_ids", [3])):
            with pytest.raises(InvalidRequest, match=name) as refused:
                await fleet.client.complete("hello", max_new_tokens=4, **{name: value})
            assert refused.value.field == f"sampling.{name}"
        answer = await fleet.http("/v1/completions", {"prompt": "hello", "ignore_eos": True})
        assert (answer.status, answer.json["error"]["param"]) == (400, "ignore_eos")


async def test_requests_go_to_those_who_can_do_what_is_asked() -> None:
    ours, engine = fake_worker("ours", max_context_tokens=4096), OpenAiEngine(owned_by="library")
    async with behind_router(ours, engine, policy="round_robin") as fleet:
        for _ in range(4):
            done = await fleet.client.complete("hello", max_new_tokens=2, ignore_eos=True)
            assert done.started.worker_id == "ours"
        told = await fleet.client.explain("hello", ignore_eos=True)
        reasons = {candidate.worker_id: candidate.ineligible_reason for candidate in told.candidates}
        assert reasons == {"ours": "", engine.worker_id: "cannot do all that is asked for"}


async def test_schemas_are_sent_as_response_format() -> None:
    engine = OpenAiEngine(owned_by="library")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with behind_router(engine) as fleet:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        }
        assert (await fleet.http("/v1/chat/completions", body)).status == 200
        sent = engine.calls[0].body["response_format"]
        assert sent["type"] == "json_schema"
        assert sent["json_schema"]["schema"] == schema | {"additionalProperties": False}


@pytest.mark.parametrize("owner", ["library", "vllm", "sglang", "llamacpp"])
async def test_tools_beside_a_schema_leave_the_schema_where_no_engine_knows_more(owner: str) -> None:
    """As agents send it. No engine of others took the grammar of a call or JSON: each such chat was refused."""
    engine, ours = OpenAiEngine(owned_by=owner), fake_worker("ours")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    async with behind_router(engine) as fleet:
        assert (await fleet.http("/v1/chat/completions", body)).status == 200
        assert engine.calls[0].body["response_format"]["json_schema"]["schema"] == schema
        demanded = await fleet.http("/v1/chat/completions", body | {"tool_choice": "required"})
        assert (demanded.status, demanded.json["error"]["param"]) == (400, "tools")
    async with behind_router(ours, engine, policy="round_robin") as fleet:
        for _ in range(2):
            assert (await fleet.http("/v1/chat/completions", body)).status == 200
        assert ["%json" in call.request.sampling.grammar.lark for call in ours.calls] == [True, True]


async def test_completions_and_an_engine_that_gives_only_one() -> None:
    engine = OpenAiEngine()
    async with behind_router(engine) as fleet:
        done = await fleet.client.complete("hello", n=3, max_new_tokens=4)
        assert [choice.text for choice in done.choices] == [letters(5 + index, 4) for index in range(3)]
        assert done.usage.completion_tokens == 12
        last = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
        engine.says = {0: last}
        with pytest.raises(InvalidRequest, match="one completion"):
            await fleet.client.complete("hello", n=2, max_new_tokens=4)


async def test_isolated_clients_and_engines_that_keep_caches_apart() -> None:
    knows, other = OpenAiEngine(owned_by="vllm"), OpenAiEngine(owned_by="library")
    async with behind_router(knows, other, policy="round_robin") as fleet:
        for _ in range(4):
            done = await fleet.client.complete("hello", max_new_tokens=2, cache_salt="tenant")
            assert done.started.worker_id == knows.worker_id
        assert {call.body["cache_salt"] for call in knows.calls} == {"tenant"}
        await knows.kill()
        await until(lambda: fleet.state(knows).ineligible_reason)
        with pytest.raises(Unavailable):
            await fleet.client.complete("hello", cache_salt="tenant")
    async with behind_router(OpenAiEngine(owned_by="library")) as fleet:
        with pytest.raises(InvalidRequest, match="keep the caches of clients apart"):
            await fleet.client.complete("hello", cache_salt="tenant")

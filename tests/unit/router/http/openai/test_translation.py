"""OpenAI's fields as the fleet's own."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from radixfleet.convert import unpack_tokens
from radixfleet.errors import InvalidRequest
from radixfleet.v1 import inference_pb2
from router.http.body import parse
from router.http.openai.plan import chat_plan
from router.http.openai.requests import ChatRequest, CompletionRequest, TokenizeRequest
from router.http.openai.translation import chat_request, completion_requests, in_openai_names, tokenize_prompt


def chat(**fields: Any) -> inference_pb2.GenerateRequest:
    given = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return chat_request(msgspec.json.decode(json.dumps(given).encode(), type=ChatRequest))


def completions(**fields: Any) -> list[inference_pb2.GenerateRequest]:
    given = {"prompt": "hi"} | fields
    return completion_requests(msgspec.json.decode(json.dumps(given).encode(), type=CompletionRequest))


def test_every_field_has_its_place() -> None:
    message = chat(
        model="m",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        n=2,
        max_tokens=9,
        min_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
        skip_special_tokens=False,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.5,
        logit_bias={"12": -1.5},
        logprobs=True,
        top_logprobs=4,
        response_format={"type": "json_object"},
        cache_salt="tenant",
        priority=3,
    )
    assert message == inference_pb2.GenerateRequest(
        model="m",
        prompt=inference_pb2.Prompt(
            chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
        ),
        sampling=inference_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            seed=7,
            n=2,
            max_new_tokens=9,
            min_new_tokens=3,
            stop=["a", "b"],
            stop_token_ids=[5],
            ignore_eos=True,
            skip_special_tokens=False,
            frequency_penalty=0.1,
            presence_penalty=0.2,
            repetition_penalty=1.5,
            logit_bias={12: -1.5},
            logprobs=4,
            grammar=inference_pb2.Grammar(json_object=True),
        ),
        cache_salt="tenant",
        priority=3,
    )


def test_what_is_not_said_is_left_to_the_fleet() -> None:
    sampling = chat().sampling
    assert sampling == inference_pb2.SamplingParams()
    assert completions()[0].sampling == inference_pb2.SamplingParams(max_new_tokens=16)


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=6).sampling.max_new_tokens == 6


def test_seeds_are_those_of_grpc_and_negative_ones_too() -> None:
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        assert chat(seed=seed).sampling.seed == seed
        assert chat(seed=seed).sampling.HasField("seed")
    assert chat(seed=-1).sampling.seed == 2**64 - 1
    assert chat(seed=-(2**63)).sampling.seed == 2**63


@pytest.mark.parametrize("seed", [2**64, 10**30])
def test_a_seed_beyond_them_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest, match=r"seed must be at most 2\^64 - 1"):
        chat(seed=seed)


def test_a_seed_far_below_zero_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"seed"):
        chat(seed=-(2**63) - 1)


def test_a_schema_keeps_its_order() -> None:
    """The order of a schema's properties is the order of the answer's."""
    schema = '{"type":"object","properties":{"b":{"const":1e2},"a":{}}}'
    wanted = f'{{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": ""}}], "response_format": {wanted}}}'
    request = msgspec.json.decode(body.encode(), type=ChatRequest)
    assert chat_request(request).sampling.grammar.json_schema == schema[:-1] + ',"additionalProperties":false}'


def test_prompts_of_every_form() -> None:
    assert completions(prompt="a")[0].prompt.text == "a"
    assert [message.prompt.text for message in completions(prompt=["a", ""])] == ["a", ""]
    ids = [unpack_tokens(message.prompt.token_ids).tolist() for message in completions(prompt=[[1], [2, 2**32 - 1]])]
    assert ids == [[1], [2, 2**32 - 1]]
    assert unpack_tokens(completions(prompt=[3, 4])[0].prompt.token_ids).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ],
)
def test_completions_that_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completions(**fields)
    assert caught.value.field == field


def test_many_prompts_do_not_take_a_large_grammar_with_them() -> None:
    """A body of 250 kB became 246 MB."""
    grammar = {"regex": "a" * 200_000}
    assert len(completions(prompt=["a"] * 80, structured_outputs=grammar)) == 80
    with pytest.raises(InvalidRequest, match="send fewer at a time") as caught:
        completions(prompt=["a"] * 1000, structured_outputs=grammar)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 3, "n": 3}, {"suffix": ""}, {"logprobs": None}])
def test_completions_that_ask_for_nothing_special(fields: dict[str, Any]) -> None:
    assert len(completions(**fields)) == 1


def test_echo_asks_for_the_prompts_probabilities_too() -> None:
    sampling = completions(echo=True, logprobs=2, max_tokens=0)[0].sampling
    assert (sampling.prompt_logprobs, sampling.logprobs, sampling.max_new_tokens) == (2, 2, 1)
    assert not completions(echo=True)[0].sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
    ],
)
def test_chats_that_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.field == field


def test_parts_of_a_message_are_lines_of_it() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompt.chat.messages[0].content == "one\ntwo"


def test_developer_is_another_name_for_system() -> None:
    sent = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]).prompt.chat
    assert [message.role for message in sent.messages] == ["system", "user"]


def test_tools_and_calls_reach_the_template_as_it_expects_them() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"function": {"name": "f", "arguments": "{"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "content": "42", "tool_call_id": "c", "name": "f"},
    ]
    sent = chat(messages=messages, tools=tools, chat_template_kwargs={"enable_thinking": False}).prompt.chat
    assert json.loads(sent.tools_json) == tools
    assert sent.tools_json.index('"b"') < sent.tools_json.index('"a"')
    assert json.loads(sent.variables_json) == {"enable_thinking": False}
    calls = json.loads(sent.messages[1].extra_json)["tool_calls"]
    assert calls[0]["function"]["arguments"] == {"x": 1}
    assert calls[1] == broken
    assert json.loads(sent.messages[2].extra_json) == {"tool_call_id": "c", "name": "f"}
    assert chat(messages=messages, tools=tools, tool_choice="none").prompt.chat.tools_json == ""


def test_depth_is_bounded_wherever_it_lies() -> None:
    """What was read on a shorter stack than it is written on was an internal error."""
    for depth in range(900, 1010):
        deep = '{"a":' * depth + "1" + "}" * depth
        for body in (
            f'{{"messages": [{{"role": "user", "content": ""}}], "chat_template_kwargs": {deep}}}',
            json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": deep}}]}]}),
        ):
            try:
                request = parse(body.encode(), ChatRequest)
                chat_request(request)
            except InvalidRequest as error:
                assert "nested too deeply" in str(error)  # noqa: PT017  it may be raised, and may not


def test_tokenizing_takes_a_text_or_messages() -> None:
    assert tokenize_prompt(TokenizeRequest(prompt="")).WhichOneof("form") == "text"
    with pytest.raises(InvalidRequest):
        tokenize_prompt(TokenizeRequest())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling.max_new_tokens", "max_tokens"),
        ("sampling.min_new_tokens", "min_tokens"),
        ("sampling.stop[3]", "stop[3]"),
        ("prompt.chat.messages[1].role", "messages[1].role"),
        ("prompt.chat.tools_json", "tools"),
        ("prompt.chat", "messages"),
        ("prompt", "prompt"),
        ("cache_salt", "cache_salt"),
    ],
)
def test_faults_are_told_in_the_clients_words(ours: str, theirs: str) -> None:
    error = in_openai_names(InvalidRequest(f"{ours} is wrong", field=ours, limit="3"))
    assert (error.field, str(error), error.metadata) == (theirs, f"{theirs} is wrong", {"limit": "3"})


@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        ({}, ""),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_a_fault_of_the_limit_names_the_field_that_was_sent(given: dict[str, Any], theirs: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | given
    plan = chat_plan(msgspec.json.decode(json.dumps(body).encode(), type=ChatRequest), "r")
    assert plan.limit == theirs
    for ours in ("sampling.max_new_tokens", "max_new_tokens"):
        error = in_openai_names(InvalidRequest(f"{ours} is wrong", field=ours), limit=plan.limit)
        assert (error.field, str(error)) == (theirs or "max_tokens", f"{theirs or 'max_tokens'} is wrong")


@pytest.mark.parametrize("ours", ["json_schema", "json_object", "regex", "lark"])
@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: A"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}}, "structured_outputs.choice"),
    ],
)
def test_a_fault_of_a_grammar_names_the_field_that_was_sent(ours: str, given: dict[str, Any], theirs: str) -> None:
    """Whatever it became: choices are a regular expression to workers."""
    body = {"messages": [{"role": "user", "content": "hi"}]} | given
    request = msgspec.json.decode(json.dumps(body).encode(), type=ChatRequest)
    plan = chat_plan(request, "r")
    field = f"sampling.grammar.{ours}"
    error = in_openai_names(InvalidRequest(f"{field} is wrong", field=field), constraint=plan.constraint)
    assert (error.field, str(error)) == (theirs, f"{theirs} is wrong")

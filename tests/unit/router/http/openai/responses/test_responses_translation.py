"""Requests for responses as chats, and the names of their fields back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from radixfleet.errors import InvalidRequest
from router.http.body import parse
from router.http.openai.responses.plan import response_plan
from router.http.openai.responses.request import ResponsesRequest
from router.http.openai.responses.translation import chat_of, in_responses_names

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
CALLED = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
RETURNED = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parsed(**fields: Any) -> ResponsesRequest:
    return parse(json.dumps({"input": "hi"} | fields).encode(), ResponsesRequest)


def chat(**fields: Any) -> dict[str, Any]:
    """The fields that are set."""
    made = json.loads(msgspec.json.encode(chat_of(parsed(**fields))))
    return {name: value for name, value in made.items() if value is not None}


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    made = chat(input=list(items), **fields)["messages"]
    return [{name: value for name, value in message.items() if value is not None} for message in made]


def test_a_request_is_the_chat_that_says_the_same() -> None:
    sampling = {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "stop": ["a"],
        "cache_salt": "tenant",
        "priority": 3,
        "min_tokens": 2,
        "ignore_eos": True,
        "logit_bias": {"5": 1.0},
        "stream": True,
    }
    function = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA, "strict": True}
    made = chat(
        **sampling,
        instructions="Be brief.",
        max_output_tokens=9,
        tools=[{"type": "function", **function}, {"type": "function", "name": "now", "parameters": None}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=4,
        chat_template_kwargs={"thinking": False},
        metadata={"a": "b"},
        store=True,
        background=False,
        truncation="disabled",
        prompt_cache_key="k",
        user="u",
        safety_identifier="s",
        reasoning={"effort": "low"},
    )
    assert made.pop("messages") == [
        {"role": role, "content": text} | dict.fromkeys(("name", "tool_calls", "tool_call_id", "reasoning_content"))
        for role, text in (("system", "Be brief."), ("user", "hi"))
    ]
    assert made == sampling | {
        "max_completion_tokens": 9,
        "tools": [{"type": "function", "function": function}, {"type": "function", "function": {"name": "now"}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "n", "strict": True}},
        "logprobs": True,
        "top_logprobs": 4,
        "chat_template_kwargs": {"thinking": False},
    }


def test_a_conversation_is_a_message_an_item() -> None:
    assert messages(
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Well.", "annotations": []}], "id": "msg_1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "why?"},
        instructions="Begin.",
    ) == [
        {"role": "system", "content": "Begin."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        {"role": "user", "content": "why?"},
    ]


def test_calls_belong_to_the_message_before_them_and_what_they_returned_follows() -> None:
    other = CALL | {"call_id": "c2"}
    assert messages(
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        {"role": "assistant", "content": "Well."},
        CALL,
        other,
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "wet"}]},
        CALL,
    ) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": [CALLED, CALLED | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "wet"}]},
        {"role": "assistant", "tool_calls": [CALLED]},
    ]


def test_an_answer_that_is_sent_back_is_one_turn() -> None:
    """Text behind a call joins its message: strict templates refuse an assistant that follows itself."""
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
    other = CALL | {"call_id": "c2"}
    both = [CALLED, CALLED | {"id": "c2"}]
    for item in (said, {"role": "assistant", "content": "Well."}):
        assert messages(item, CALL, {"role": "assistant", "content": "And"}, other, RETURNED) == [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "Well."}, {"type": "text", "text": "And"}],
                "tool_calls": both,
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
    assert messages(CALL, said, other) == [
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}], "tool_calls": both}
    ]


def test_log_probabilities_are_told_to_those_who_ask() -> None:
    assert chat(top_logprobs=3)["logprobs"] is False
    assert "top_logprobs" not in chat(top_logprobs=3)


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "nothing is stored here"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "nothing is stored here"),
        ({"background": True}, "background", "stream the answer"),
        ({"truncation": "auto"}, "truncation", "no input is shortened"),
        ({"response_format": {"type": "json_object"}}, "response_format", "send text.format"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"max_tokens": 0}, "max_tokens", "send max_output_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "max_completion_tokens is not served: send max_output"),
        ({"n": 2}, "n", "send a request for each answer"),
        ({"logprobs": True}, "logprobs", "send include: ['message.output_text.logprobs']"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"audio": {"voice": "x"}}, "audio", "write text alone"),
        ({"modalities": ["text", "audio"]}, "modalities", "write text alone"),
        ({"web_search_options": {}}, "web_search_options", "nothing is searched"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "length <= 64"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "length <= 512"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be 1 or more"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": [{"type": "reasoning"}]}, "input", "nothing but reasoning"),
        ({"input": [{"content": "hi"}]}, "input[0].role", "missing"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "so send the item itself"),
        ({"input": [{"type": None, "id": "msg_1"}]}, "input[0]", "so send the item itself"),
        ({"input": [{"id": "msg_1"}]}, "input[0]", "so send the item itself"),
        (
            {"input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot"}}]},
            "input[0].type",
            "is 'computer_call_output': items may be",
        ),
        ({"input": [{"type": "tool_search_call", "arguments": {"q": 1}}]}, "input[0].type", "'tool_search_call'"),
        ({"input": [{"type": "shell_call_output", "output": [{"stdout": "a"}]}]}, "input[0].type", "'shell_call"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments", "must be JSON in a text"),
        ({"input": [RETURNED | {"output": {}}]}, "input[0].output", "must be a text"),
        ({"input": [CALL | {"call_id": None}]}, "input[0].call_id", "missing"),
        ({"input": [CALL | {"name": None}]}, "input[0].name", "missing"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "read text alone",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "missing"),
        ({"input": [{"role": "user", "content": [{"text": "hi"}]}]}, "input[0].content[0].type", "missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be 'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name must be a text"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters", "must be an object"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", '{"type": "function", "name": ...}'),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"guided_json": {}}, "guided_json", "is not served: send text.format, or structured_outputs"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "grammar"),
        ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
    ],
)
def test_what_is_refused_is_refused_by_the_clients_own_name(fields: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        response_plan(parsed(**fields), "id")
    assert caught.value.field == field
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("messages", "input"),
        ("messages[2].extra_json", "input"),
        ("prompt", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("max_tokens", "max_output_tokens"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tools[3].function.parameters", "tools[3].parameters"),
        ("temperature", "temperature"),
    ],
)
def test_what_fails_later_is_told_in_the_clients_names_too(ours: str, theirs: str) -> None:
    error = in_responses_names(InvalidRequest("wrong", field=ours, limit="3"))
    assert (error.field, error.metadata["limit"]) == (theirs, "3")


def test_a_plan_tells_what_fails_later_so() -> None:
    plan = response_plan(parsed(max_output_tokens=5), "id")
    assert plan.in_client_names(InvalidRequest("max_completion_tokens is too much")).args == (
        "max_output_tokens is too much",
    )


def test_what_the_client_has_quoted_stays_as_it_wrote_it() -> None:
    error = InvalidRequest("response_format goes with no model's 'max_tokens', nor max_tokens")
    assert str(in_responses_names(error)) == "text.format goes with no model's 'max_tokens', nor max_output_tokens"

"""The tools of a chat: which the model is shown, and what a demanded call allows."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from radixfleet.errors import InvalidRequest
from radixfleet.types import Grammar, GrammarKind
from radixfleet.v1 import inference_pb2
from router.http.body import parse
from router.http.openai.plan import chat_plan
from router.http.openai.requests import ChatRequest
from router.http.openai.translation import chat_request
from tests.support.byte_tokenizer import END_ID, byte_spec
from worker.sampling.grammar import GrammarCompiler
from worker.servicer.grammar_check import why_not

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOWN = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "$defs": {"Town": TOWN},
            "properties": {"town": {"$ref": "#/$defs/Town"}, "days": {"type": "integer"}},
            "required": ["town", "days"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ABOUT_BERN = '<tool_call>\n{"name": "weather", "arguments": {"town": {"name": "Bern"}, "days": 2}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}


def request(**fields: Any) -> ChatRequest:
    given = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return msgspec.json.decode(json.dumps(given).encode(), type=ChatRequest)


def chat(**fields: Any) -> inference_pb2.GenerateRequest:
    return chat_request(request(**fields))


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({}, "function"),
        ({"type": "function"}, "function"),
        ({"type": "web_search"}, "type"),
        ({"type": "function", "function": {}}, "function.name"),
        ({"type": "function", "function": {"name": ""}}, "function.name"),
        ({"type": "function", "function": {"name": 5}}, "function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": "x"}}, "function.parameters"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tools_are_functions_with_names(tool: dict[str, Any], field: str, choice: str) -> None:
    assert refused(tools=[FUNCTION, tool], tool_choice=choice).field == f"tools[1].{field}"


def test_tools_need_no_parameters() -> None:
    tools = [FUNCTION, {"function": {"name": "g"}}, {"type": "function", "function": {"name": "h", "parameters": None}}]
    assert json.loads(chat(tools=tools).prompt.chat.tools_json) == tools


ONE = {"tool_choice": "required", "parallel_tool_calls": False}


@pytest.mark.parametrize(
    ("fields", "allowed", "others"),
    [
        (
            {"tool_choice": NAMED},
            [ABOUT_BERN],
            [
                TIME,
                f"{ABOUT_BERN}\n{ABOUT_BERN}",
                ABOUT_BERN.replace("2", '"two"'),
                ABOUT_BERN.replace("2", '2, "hours": 5'),
                "It is sunny.",
                "",
            ],
        ),
        ({"tool_choice": "required"}, [TIME, f"{TIME}\n{ABOUT_BERN}"], [TIME.replace("{}", '{"zone": "utc"}'), ""]),
        (ONE, [TIME, ABOUT_BERN], [f"{TIME}\n{ABOUT_BERN}"]),
        (ONE | {"response_format": {"type": "json_object"}}, [TIME], ["{}"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": TOWN}}},
            ['{"name": "Bern"}', TIME, f"{TIME}\n{TIME}"],
            ["", '{"name":   "Bern"}', "It is sunny.", "{}", '{"name": "Bern", "age": 5}'],
        ),
        ({"response_format": {"type": "json_object"}}, ["{}", '{"a": 1}', TIME], ["[]", "It is sunny."]),
    ],
)
def test_calls_and_answers_that_are_allowed(fields: dict[str, Any], allowed: list[str], others: list[str]) -> None:
    sent = chat(tools=[WEATHER, CLOCK], **fields)
    assert json.loads(sent.prompt.chat.tools_json) == [WEATHER, CLOCK]
    compiler, grammar = GrammarCompiler(byte_spec()), Grammar(GrammarKind.LARK, sent.sampling.grammar.lark)
    assert why_not(compiler, grammar) == ""
    for answer in allowed + others:
        matcher = compiler.fresh_matcher(grammar)
        matcher.accept(*answer.encode(), END_ID)
        assert (not matcher.error) is (answer in allowed), answer


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_demanded(choice: str | None) -> None:
    assert not chat(tools=[WEATHER], tool_choice=choice).sampling.HasField("grammar")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [FUNCTION]},
        {"tool_choice": {"type": "function"}, "tools": [FUNCTION]},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [FUNCTION]},
        {"tool_choice": "required", "tools": [FUNCTION], "structured_outputs": {"regex": "a"}},
    ],
)
def test_demands_that_are_refused(fields: dict[str, Any]) -> None:
    assert refused(**fields).field == "tool_choice"


def test_a_schema_binds_alone_where_no_tool_is_shown() -> None:
    fields = {"tools": [CLOCK], "tool_choice": "none", "response_format": {"type": "json_object"}}
    assert chat(**fields).sampling.grammar.json_object


@pytest.mark.parametrize(("strict", "is_taken"), [({}, True), ({"strict": False}, True), ({"strict": True}, False)])
def test_what_cannot_be_enforced_is_refused_of_strict_tools_alone(strict: dict[str, Any], is_taken: bool) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "unheard-of"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters} | strict}
    grammar = Grammar(GrammarKind.LARK, chat(tools=[tool], tool_choice="required").sampling.grammar.lark)
    assert (why_not(GrammarCompiler(byte_spec()), grammar) == "") is is_taken


def test_depth_is_bounded() -> None:
    for depth in range(900, 1010):
        tool = '{"function":{"name":"f","parameters":' + '{"a":' * depth + "1" + "}" * depth + "}}"
        body = f'{{"messages":[{{"role":"user","content":""}}],"tools":[{tool}],"tool_choice":"required"}}'
        try:
            chat_request(parse(body.encode(), ChatRequest))
        except InvalidRequest as error:
            assert "nested too deeply" in str(error)  # noqa: PT017  it may be raised, and may not


def test_a_schema_with_a_number_that_cannot_be_read_is_refused() -> None:
    schema = '{"const":' + "1" * 5000 + "}"
    wanted = f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
    tools = json.dumps([WEATHER])
    body = f'{{"messages":[{{"role":"user","content":""}}],"tools":{tools},"response_format":{wanted}}}'
    with pytest.raises(InvalidRequest) as caught:
        chat_request(msgspec.json.decode(body.encode(), type=ChatRequest))
    assert caught.value.field == "response_format.json_schema.schema"


def test_a_schema_at_fault_is_named_as_one_of_the_tools() -> None:
    assert chat_plan(request(tools=[WEATHER], tool_choice="required"), "1").constraint == "tools"

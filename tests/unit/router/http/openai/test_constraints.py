"""What an answer has to keep to, in every form in which clients say it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from radixfleet.errors import InvalidRequest
from radixfleet.types import Grammar, GrammarKind
from radixfleet.v1 import inference_pb2
from router.http.openai.requests import ChatRequest, CompletionRequest
from router.http.openai.translation import chat_request, completion_requests
from tests.support.byte_tokenizer import byte_spec
from worker.sampling.grammar import GrammarCompiler
from worker.servicer.grammar_check import why_not

TEXTS = [
    "yes",
    'a "b"',
    "c\\d",
    "two\nlines",
    "/x/",
    "g\u00fcn",
    '{"x": [1]}',
    "a.b*c+d?",
    "^(a|b)$",
    "#&~-@!%=<>,;:'`",
]


def chat(**fields: Any) -> inference_pb2.GenerateRequest:
    given = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return chat_request(msgspec.json.decode(json.dumps(given).encode(), type=ChatRequest))


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"json": '{"type":"object"}'}, {"json_schema": '{"type":"object"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+", "json_object": False}, {"regex": "a+"}),
        ({"grammar": "start: /a+/"}, {"lark": "start: /a+/"}),
        ({"choice": ["yes", "a|b (c)."]}, {"regex": r"yes|a\|b \(c\)\."}),
    ],
)
def test_structured_outputs(given: dict[str, Any], grammar: dict[str, Any]) -> None:
    expected = inference_pb2.Grammar(**grammar)
    assert chat(structured_outputs=given).sampling.grammar == expected
    assert chat(structured_outputs=given, response_format={"type": "text"}).sampling.grammar == expected
    completion = CompletionRequest(prompt="hi", structured_outputs=chat_format(given))
    assert completion_requests(completion)[0].sampling.grammar == expected


def chat_format(given: dict[str, Any]) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": ""}], "structured_outputs": given}).encode()
    return msgspec.json.decode(body, type=ChatRequest).structured_outputs


def test_a_choice_is_a_grammar_whatever_the_texts_hold() -> None:
    compiler = GrammarCompiler(byte_spec())
    grammar = Grammar(GrammarKind.REGEX, chat(structured_outputs={"choice": TEXTS}).sampling.grammar.regex)
    assert why_not(compiler, grammar) == ""
    for text in TEXTS:
        matcher = compiler.fresh_matcher(grammar)
        for byte in text.encode():
            matcher.accept(byte)
            assert matcher.error == ""
        assert matcher.is_ended


@pytest.mark.parametrize("given", [{}, {"json_object": False}, {"regex": "a", "grammar": "b"}, {"unknown": 1}])
def test_one_form_is_needed(given: dict[str, Any]) -> None:
    error = refused(structured_outputs=given)
    assert error.field == "structured_outputs"
    assert "exactly one of json, regex" in str(error)


@pytest.mark.parametrize("choice", [[], [""], ["a", ""]])
def test_choices_have_texts(choice: list[str]) -> None:
    assert refused(structured_outputs={"choice": choice}).field == "structured_outputs.choice"


def test_two_ways_at_once_are_refused() -> None:
    both = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    assert refused(**both).field == "structured_outputs"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("guided_grammar", "a"),
        ("guided_choice", ["a"]),
        ("regex", "a"),
        ("ebnf", "a"),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "alloy"}),
        ("web_search_options", {}),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_would_change_the_answer_is_not_ignored(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.field == name
    assert str(error).startswith(f"{name} ")


def test_nothing_is_refused_of_those_who_say_nothing() -> None:
    plain = chat()
    nothing = {"functions": [], "audio": None, "guided_json": None, "regex": "", "modalities": ["text"]}
    assert chat(**nothing, metadata={"a": 1}, function_call="none") == plain

"""Requests from plain values, and what is refused before it is sent."""

from __future__ import annotations

import numpy as np
import pytest

from radixfleet.compose import SamplingOptions, generate_request, prompt_to_pb
from radixfleet.convert import prompt_form
from radixfleet.errors import InvalidRequest
from radixfleet.sampling import sampling_params
from radixfleet.types import ChatMessage, ChatPrompt, Grammar, GrammarKind

MESSAGES = (ChatMessage("user", "hé"), ChatMessage("assistant", ""))


@pytest.mark.parametrize(
    "given",
    [
        list(MESSAGES),
        MESSAGES,
        [{"role": "user", "content": "hé"}, {"role": "assistant", "content": ""}],
        [MESSAGES[0], {"role": "assistant", "content": ""}],
        ChatPrompt(MESSAGES),
    ],
    ids=["list", "tuple", "dicts", "mixed", "prompt"],
)
def test_chats_of_every_form(given):
    assert prompt_form(prompt_to_pb(given)) == ChatPrompt(MESSAGES)


def test_a_chat_that_is_to_be_continued():
    prompt = ChatPrompt(MESSAGES, add_generation_prompt=False)
    assert prompt_form(prompt_to_pb(prompt)) == prompt


def test_a_chat_with_all_that_its_template_may_ask_for():
    messages = (*MESSAGES, ChatMessage("assistant", "", {"tool_calls": [{"id": "é"}]}))
    prompt = ChatPrompt(messages, tools=({"type": "function"},), variables={"enable_thinking": False})
    assert prompt_form(prompt_to_pb(prompt)) == prompt


@pytest.mark.parametrize(
    "given",
    [[5, 0, 2**32 - 1], (5, 0, 2**32 - 1), np.array([5, 0, 2**32 - 1]), np.array([5, 0, 2**32 - 1], dtype=np.uint32)],
    ids=["list", "tuple", "int64", "uint32"],
)
def test_token_ids_of_every_form(given):
    assert prompt_form(prompt_to_pb(given)).tolist() == [5, 0, 2**32 - 1]


def test_text():
    assert prompt_form(prompt_to_pb("hé")) == "hé"


def test_an_empty_list_is_an_empty_prompt():
    """Behaviour 40: it has no tokens, and the server says so."""
    with pytest.raises(InvalidRequest, match="empty"):
        prompt_form(prompt_to_pb([]))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([-1], "prompt.token_ids"),
        ([2**32], "prompt.token_ids"),
        ([2**70], "prompt.token_ids"),
        ([1.5], "prompt.token_ids"),
        ([1, "2"], "prompt.token_ids"),
        ([[1], [2]], "prompt.token_ids"),
        ([[1], [2, 3]], "prompt.token_ids"),
        ([True, False], "prompt.token_ids"),
        ("a\ud800", "prompt.text"),
        ([{"role": "user", "content": "ok"}, {"role": "user", "content": "\udfff"}], "prompt.chat.messages[1].content"),
        ([{"role": "\ud800", "content": "ok"}], "prompt.chat.messages[0].role"),
        ([{"role": "user"}], "prompt.chat.messages[0]"),
        ([{"role": "user", "content": "x", "name": "y"}], "prompt.chat.messages[0]"),
        ([{"role": "user", "content": None}], "prompt.chat.messages[0].content"),
        ([{"role": "user", "content": "x"}, 7], "prompt.chat.messages[1]"),
    ],
)
def test_refused_with_the_field(given, field):
    """Behaviour 42: lone surrogates among them."""
    with pytest.raises(InvalidRequest) as caught:
        prompt_to_pb(given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stop": ["ok", "\ud800"]}, "sampling.stop[1]"),
        ({"request_id": "\ud800"}, "request_id"),
        ({"model": "\ud800"}, "model"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
)
def test_a_lone_surrogate_in_an_option(options, field):
    """Behaviour 42: in every field that holds text."""
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        generate_request("x", options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options",
    [{"top_k": 2**31}, {"seed": -1}, {"max_new_tokens": 1.5}, {"temperature": "hot"}, {"priority": 2**40}, {"typo": 1}],
    ids=str,
)
def test_options_that_the_wire_cannot_carry(options):
    name = next(iter(options))
    with pytest.raises(InvalidRequest, match=f"{name} cannot be sent") as caught:
        generate_request("x", {"temperature": 0, "model": "m"} | options)
    assert caught.value.field == (name if name in {"priority", "typo"} else f"sampling.{name}")


@pytest.mark.parametrize("prompt", [5, 1.5, None, {"role": "user"}, {1, 2}], ids=repr)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(InvalidRequest, match="flat sequence of whole numbers"):
        generate_request(prompt, {})


def test_options_arrive():
    options = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "seed": 2**64 - 1,
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "stop": "one string",
        "stop_token_ids": [4],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {7: -3.0},
        "logprobs": 2,
        "prompt_logprobs": 0,
        "n": 3,
        "request_id": "r",
        "model": "m",
        "cache_salt": "c",
        "priority": -2,
        "lease_id": "l",
    }
    request = generate_request("x", options)
    for name in ("request_id", "model", "cache_salt", "priority", "lease_id"):
        assert getattr(request, name) == options[name]
    sampling = sampling_params(request.sampling)
    assert sampling.stop == ("one string",)
    assert sampling.stop_token_ids == (4,)
    for name in set(options) & set(type(sampling).__slots__) - {"stop", "stop_token_ids", "logit_bias"}:
        assert getattr(sampling, name) == options[name]
    assert sampling.logit_bias == ((7, -3.0),)
    sampling_options = set(options) - {"request_id", "model", "cache_salt", "priority", "lease_id"}
    assert sampling_options | {kind.value for kind in GrammarKind} == set(SamplingOptions.__annotations__)


@pytest.mark.parametrize(
    ("options", "kind", "source"),
    [
        ({"json_schema": '{"type": "string"}'}, GrammarKind.JSON_SCHEMA, '{"type": "string"}'),
        ({"json_schema": {"enum": ["é"]}}, GrammarKind.JSON_SCHEMA, '{"enum": ["é"]}'),
        ({"json_object": True}, GrammarKind.JSON_OBJECT, ""),
        ({"regex": "a+", "lark": None}, GrammarKind.REGEX, "a+"),
        ({"lark": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
    ],
    ids=str,
)
def test_grammars_arrive(options, kind, source):
    assert sampling_params(generate_request("x", options).sampling).grammar == Grammar(kind, source)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "a", "lark": "b"}, "sampling.grammar"),
        ({"regex": "\ud800"}, "sampling.grammar.regex"),
        ({"regex": 7}, "sampling.grammar.regex"),
        ({"json_schema": {"enum": [b"no JSON"]}}, "sampling.grammar.json_schema"),
    ],
    ids=str,
)
def test_grammars_that_the_wire_cannot_carry(options, field):
    """Behaviour 42: a lone surrogate among them."""
    with pytest.raises(InvalidRequest) as caught:
        generate_request("x", options)
    assert caught.value.field == field


def test_what_is_absent_or_none_is_left_to_the_server():
    request = generate_request("x", {"temperature": None, "stop": None, "request_id": None})
    assert request.sampling.ByteSize() == 0
    assert request.request_id == ""

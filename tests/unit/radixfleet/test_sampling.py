"""What sampling parameters may be, and that they come out of the wire as they went in."""

from __future__ import annotations

import math

import pytest

from radixfleet.errors import InvalidRequest
from radixfleet.sampling import sampling_params
from radixfleet.types import Grammar, GrammarKind, SamplingParams
from radixfleet.v1 import inference_pb2 as pb
from tests.support.sampling_messages import sampling_to_pb


def refused(message: pb.SamplingParams, **options) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        sampling_params(message, **options)
    return caught.value


def test_defaults_are_those_that_the_proto_names():
    assert sampling_params(pb.SamplingParams()) == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, max_new_tokens=None, skip_special_tokens=True
    )


def test_what_is_set_is_kept():
    expected = SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.25,
        seed=2**64 - 1,
        max_new_tokens=10,
        min_new_tokens=10,
        stop=("a", "é"),
        stop_token_ids=(7, 3),
        ignore_eos=True,
        skip_special_tokens=False,
        frequency_penalty=-2.0,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias=((0, -100.0), (9, 0.5)),
        logprobs=0,
        prompt_logprobs=20,
        n=64,
        grammar=Grammar(GrammarKind.REGEX, "a+"),
    )
    assert sampling_params(sampling_to_pb(expected)) == expected


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, "{}"),
        Grammar(GrammarKind.JSON_OBJECT, ""),
        Grammar(GrammarKind.REGEX, "é" * (128 * 1024)),
        Grammar(GrammarKind.LARK, 'start: "a"'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_every_kind_of_grammar_is_kept(grammar):
    assert sampling_params(sampling_to_pb(SamplingParams(grammar=grammar))).grammar == grammar


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, -1e-9, 1e300, 100.1])
def test_floats_that_mean_nothing_are_refused(name, value):
    """Behaviour 34: NaN, infinite, negative or absurd parameters are refused with the field's name."""
    error = refused(pb.SamplingParams(**{name: value}))
    assert error.field == f"sampling.{name}"
    assert error.field in str(error)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.0001}, "sampling.top_p"),
        ({"min_p": 1.5}, "sampling.min_p"),
        ({"top_k": -2}, "sampling.top_k"),
        ({"top_k": -(2**31)}, "sampling.top_k"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens"),
        ({"max_new_tokens": 2**31}, "sampling.max_new_tokens"),
        ({"max_new_tokens": 2**64 - 1}, "sampling.max_new_tokens"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "sampling.min_new_tokens"),
        ({"min_new_tokens": 2**63}, "sampling.min_new_tokens"),
        ({"stop": [""]}, "sampling.stop[0]"),
        ({"stop": ["ok", "x" * 1025]}, "sampling.stop[1]"),
        ({"stop": ["é" * 513]}, "sampling.stop[0]"),
        ({"stop": [str(n) for n in range(17)]}, "sampling.stop"),
        ({"stop_token_ids": range(1025)}, "sampling.stop_token_ids"),
        ({"stop_token_ids": [5, 100]}, "sampling.stop_token_ids"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"logit_bias": {100: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {5: math.nan}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {5: -math.inf}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {5: 100.5}}, "sampling.logit_bias[5]"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "sampling.logit_bias"),
        ({"logprobs": 21}, "sampling.logprobs"),
        ({"logprobs": 2**32 - 1}, "sampling.logprobs"),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
        ({"grammar": pb.Grammar()}, "sampling.grammar"),
        ({"grammar": pb.Grammar(json_object=False)}, "sampling.grammar.json_object"),
        ({"grammar": pb.Grammar(regex="")}, "sampling.grammar.regex"),
        ({"grammar": pb.Grammar(lark="é" * (128 * 1024) + "a")}, "sampling.grammar.lark"),
    ],
)
def test_refused_with_the_field(fields, field):
    """Behaviours 34 and 40: max_new_tokens 0 among them."""
    error = refused(pb.SamplingParams(**fields), vocab_size=100)
    assert error.field == field
    assert field in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 100.0},
        {"temperature": 5e-324},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"top_k": 2**31 - 1},
        {"max_new_tokens": 1},
        {"max_new_tokens": 99_999_999},
        {"stop": ["x" * 1024] * 16},
        {"stop": [str(n) for n in range(16)]},
        {"stop_token_ids": [0, 99]},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"logit_bias": {0: -100.0, 99: 100.0}},
        {"logprobs": 20, "prompt_logprobs": 0},
        {"n": 64},
    ],
)
def test_the_bounds_themselves_are_allowed(fields):
    """Behaviour 40: whether 99,999,999 tokens fit is for the worker to say, who knows its pool."""
    sampling_params(pb.SamplingParams(**fields), vocab_size=100)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.1, 2.1, 1e300])
def test_penalties_that_mean_nothing_are_refused(name, value):
    """Behaviour 34: as above; these may be negative."""
    assert refused(pb.SamplingParams(**{name: value})).field == f"sampling.{name}"


@pytest.mark.parametrize("n", [0, 65, 2**31, 2**63 - 1, 2**64 - 1])
def test_absurd_numbers_of_completions_are_refused(n):
    """Behaviour 43: n = 2^63 - 1 among them."""
    error = refused(pb.SamplingParams(n=n))
    assert error.field == "sampling.n"
    assert "from 1 to 64" in str(error)


@pytest.mark.parametrize(("given", "expected"), [(-1, 0), (0, 0), (1, 1)])
def test_top_k_of_minus_one_keeps_all(given, expected):
    assert sampling_params(pb.SamplingParams(top_k=given)).top_k == expected


def test_repeated_stops_count_once():
    sampling = sampling_params(pb.SamplingParams(stop=["b", "a", "b"] * 10, stop_token_ids=[2, 1, 2]))
    assert sampling.stop == ("b", "a")
    assert sampling.stop_token_ids == (2, 1)


def test_minus_zero_is_greedy():
    assert math.copysign(1, sampling_params(pb.SamplingParams(temperature=-0.0)).temperature) == 1


def test_the_field_is_named_from_where_it_stands():
    error = refused(pb.SamplingParams(min_p=2), field="request.sampling")
    assert error.field == "request.sampling.min_p"

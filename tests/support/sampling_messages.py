"""The way back: messages of values that are known to be right."""

from __future__ import annotations

import dataclasses

from radixfleet.types import Grammar, GrammarKind, SamplingParams
from radixfleet.v1 import inference_pb2


def sampling_to_pb(sampling: SamplingParams) -> inference_pb2.SamplingParams:
    """The message that `radixfleet.sampling.sampling_params` turns back into `sampling`."""
    same = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    grammar = None if sampling.grammar is None else _grammar_to_pb(sampling.grammar)
    return inference_pb2.SamplingParams(**(same | {"logit_bias": dict(sampling.logit_bias), "grammar": grammar}))


def _grammar_to_pb(grammar: Grammar) -> inference_pb2.Grammar:
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return inference_pb2.Grammar(json_object=True)
    return inference_pb2.Grammar(**{grammar.kind.value: grammar.source})

"""Grammars for tests, and what the tiny model's tokenizer makes of texts."""

from __future__ import annotations

import functools
import json

from radixfleet.text import Tokenizer
from radixfleet.types import Grammar, GrammarKind
from tests.support.tiny_model import tiny_model
from worker.model.tokenizer_files import load_tokenizer_spec

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 200}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
"""A JSON Schema whose every answer is short."""


def regex(source: str) -> Grammar:
    """The whole text matches."""
    return Grammar(GrammarKind.REGEX, source)


def schema(value: object) -> Grammar:
    """A JSON Schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """That of `tiny_model`."""
    return Tokenizer(load_tokenizer_spec(tiny_model()))

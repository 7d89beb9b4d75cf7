"""Objects that list their properties have no others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.http.openai.closed_schema import closed

NAME: dict[str, Any] = {"properties": {"name": {"type": "string"}}}
CLOSED = NAME | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAME, CLOSED),
        (NAME | {"required": ["name"]}, CLOSED | {"required": ["name"]}),
        ({"properties": {"inner": NAME}}, {"properties": {"inner": CLOSED}, "additionalProperties": False}),
        ({"items": NAME, "prefixItems": [NAME, True]}, {"items": CLOSED, "prefixItems": [CLOSED, True]}),
        ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": NAME}}, {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}}),
        ({"additionalProperties": NAME}, {"additionalProperties": CLOSED}),
        (
            {"properties": {"properties": {"type": "string"}}},
            {"properties": {"properties": {"type": "string"}}, "additionalProperties": False},
        ),
    ],
)
def test_listed_properties_are_all(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert json.loads(closed(json.dumps(schema))) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        NAME | {"additionalProperties": True},
        NAME | {"additionalProperties": {"type": "integer"}},
        NAME | {"required": ["name", "other"]},
        NAME | {"required": [["name"], 1]},
        NAME | {"required": 5},
        {"properties": {}},
        {"properties": 5},
        {"const": NAME, "enum": [NAME], "default": NAME},
        {"allOf": [NAME, {"properties": {"age": {"type": "integer"}}}]},
        NAME | {"anyOf": [{"properties": {"age": {"type": "integer"}}}]},
        NAME | {"$ref": "#/$defs/a", "$defs": {"a": NAME}},
        {"required": ["id"], "anyOf": [NAME]},
        {"required": ["id"], "$ref": "#/$defs/a", "$defs": {"a": NAME}},
        NAME | {"patternProperties": {"^x": {"type": "integer"}}},
        True,
        [NAME],
        "text",
    ],
)
def test_anything_else_stays_as_it_is(schema: Any) -> None:
    assert closed(json.dumps(schema)) == json.dumps(schema)


def test_numbers_stay_as_they_are_written() -> None:
    numbers = "1e2,0.10,1e999,100,12345678901234567890123"
    expected = f'{{"properties":{{"a":{{"enum":[{numbers}]}}}},"additionalProperties":false}}'
    assert closed(f'{{"properties":{{"a":{{"enum":[{numbers}]}}}}}}') == expected


@pytest.mark.parametrize("text", ["", "no JSON", "{", '{"items":' * 5000 + "1" + "}" * 5000])
def test_what_cannot_be_read_stays_as_it_is(text: str) -> None:
    assert closed(text) == text

"""JSON schemas as clients mean them: an object that lists its properties has no others.

JSON Schema allows any further property where a schema says nothing of `additionalProperties`, and a model that may go
on with another one often does so without end. Other engines close such objects too, by xgrammar's strict mode or as
Outlines does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

_OF_NAMES = ("properties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties")
"""Keywords that hold further schemas: by name, in a list, or one."""
_COMBINING = frozenset(
    {"anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties", "unevaluatedProperties"}
)
"""Beside `properties` or `required`, they have a say in what the object may hold."""
_DECODER = msgspec.json.Decoder(float_hook=lambda number: msgspec.Raw(number.encode()))
"""Leaves numbers as they are written: 1e2 would become 100.0."""


def closed(text: str) -> str:
    """The schema without properties that it does not list; as it is where it puts objects together from parts.

    What is no JSON stays as it is, for whoever compiles it to refuse.
    """
    try:
        schema = _DECODER.decode(text)
        parts = list(_parts(schema))
        if any(_is_combined(part) for part in parts):
            return text
        open_parts = [part for part in parts if _is_open(part)]
        for part in open_parts:
            part["additionalProperties"] = False
        return msgspec.json.encode(schema).decode() if open_parts else text
    except (msgspec.DecodeError, RecursionError):
        return text


def _is_combined(part: dict[str, Any]) -> bool:
    return "allOf" in part or bool({"properties", "required"} & part.keys() and _COMBINING & part.keys())


def _is_open(part: dict[str, Any]) -> bool:
    """It lists properties, all that it requires among them, and says nothing of others."""
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, dict) or not properties or "additionalProperties" in part:
        return False
    return isinstance(required, list) and all(str(name) in properties for name in required)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """It, and all schemas in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _OF_NAMES:
            if isinstance(part.get(name), dict):
                waiting += part[name].values()
        for name in _IN_LISTS:
            if isinstance(part.get(name), list):
                waiting += part[name]
        waiting += [part[name] for name in _ALONE if name in part]

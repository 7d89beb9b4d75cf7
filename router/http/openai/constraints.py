"""What an answer has to keep to: a demanded call of a tool, OpenAI's `response_format`, vLLM's `structured_outputs`,
and other names for the same.

Fields that nobody knows are ignored. Those that are known elsewhere, and would change what the answer is, are refused
instead: an answer that keeps to nothing would look like one that does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeGuard

import msgspec

from radixfleet.errors import InvalidRequest
from radixfleet.v1 import inference_pb2
from router.http.openai.closed_schema import closed
from router.http.openai.requests import ChatRequest, ChoicesRequest, JsonFormat, SchemaFormat, StructuredOutputs
from router.http.openai.tools import call_grammar, demands_call, shown_tools

_FORMS = "send response_format, or structured_outputs with json, regex, grammar or choice"
_INSTEAD: Mapping[str, str] = {
    "guided_json": _FORMS,
    "guided_regex": _FORMS,
    "guided_grammar": _FORMS,
    "guided_choice": _FORMS,
    "regex": _FORMS,
    "ebnf": _FORMS,
    "functions": "send tools",
    "audio": "the models served here write text alone",
    "web_search_options": "nothing is searched here",
}
"""What to do in the place of a field."""
_ANY_OBJECT = '{"type":"object"}'
_NULL = msgspec.Raw(b"null")
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
"""What means something in a regular expression."""


def refuse_other_names(request: ChoicesRequest) -> None:
    """Raises InvalidRequest for a field that would be ignored, and must not be."""
    for name, instead in _INSTEAD.items():
        value = getattr(request, name, None)
        if value is not None and value not in ([], ""):
            raise InvalidRequest(f"{name} is not served: {instead}", field=name)
    if isinstance(request, ChatRequest) and set(request.modalities or ()) - {"text"}:
        raise InvalidRequest("modalities may be text alone", field="modalities")


def grammar(request: ChoicesRequest) -> inference_pb2.Grammar | None:
    """None: anything goes. Raises InvalidRequest.

    A demanded call goes before `response_format`, and a model that is shown tools may call instead, as with OpenAI.
    """
    own, other = request.response_format, request.structured_outputs
    if isinstance(request, ChatRequest) and demands_call(request):
        if other is not None:
            raise InvalidRequest("tool_choice demands a call, which structured_outputs rules out", field="tool_choice")
        return inference_pb2.Grammar(lark=call_grammar(request))
    if other is not None:
        if isinstance(own, JsonFormat | SchemaFormat):
            raise InvalidRequest("give response_format or structured_outputs, not both", field="structured_outputs")
        return _structured(other)
    json_only = _json_only(request)
    if json_only is not None and _may_call(request):
        return inference_pb2.Grammar(lark=call_grammar(request, or_schema=json_only.json_schema or _ANY_OBJECT))
    return json_only


def grammar_of_few(request: ChatRequest) -> inference_pb2.Grammar | None:
    """In the place of `grammar` where no engine knows its form: `response_format` alone. None: nothing is."""
    is_needed = request.structured_outputs is None and not demands_call(request) and _may_call(request)
    return _json_only(request) if is_needed else None


def _may_call(request: ChoicesRequest) -> TypeGuard[ChatRequest]:
    return isinstance(request, ChatRequest) and bool(shown_tools(request))


def _json_only(request: ChoicesRequest) -> inference_pb2.Grammar | None:
    own = request.response_format
    if isinstance(own, SchemaFormat):
        return inference_pb2.Grammar(json_schema=closed(bytes(own.json_schema.schema).decode()))
    return inference_pb2.Grammar(json_object=True) if isinstance(own, JsonFormat) else None


def constraint_field(request: ChoicesRequest) -> str:
    """The client's name for what `grammar` makes of its request, which is valid."""
    if isinstance(request, ChatRequest) and demands_call(request):
        return "tools"
    if request.structured_outputs is not None:
        return f"structured_outputs.{_kinds(request.structured_outputs)[0]}"
    is_schema = isinstance(request.response_format, SchemaFormat)
    return "response_format.json_schema.schema" if is_schema else "response_format"


def _structured(given: StructuredOutputs) -> inference_pb2.Grammar:
    kinds = _kinds(given)
    if len(kinds) != 1:
        known, found = ", ".join(given.__struct_fields__), " and ".join(kinds) or "none"
        raise InvalidRequest(
            f"structured_outputs must have exactly one of {known}; it has {found}", field="structured_outputs"
        )
    if given.json != _NULL:
        return inference_pb2.Grammar(json_schema=closed(_schema_text(given.json)))
    if given.regex is not None:
        return inference_pb2.Grammar(regex=given.regex)
    if given.grammar is not None:
        return inference_pb2.Grammar(lark=given.grammar)
    if given.choice is not None:
        if not given.choice or not all(given.choice):
            raise InvalidRequest(
                "structured_outputs.choice must have texts, none of them empty", field="structured_outputs.choice"
            )
        # More engines know regular expressions than Lark.
        return inference_pb2.Grammar(regex="|".join(_SPECIAL.sub(r"\\\g<0>", choice) for choice in given.choice))
    return inference_pb2.Grammar(json_object=True)


def _kinds(given: StructuredOutputs) -> list[str]:
    return [name for name in given.__struct_fields__ if getattr(given, name) not in (None, False, _NULL)]


def _schema_text(schema: msgspec.Raw) -> str:
    """vLLM takes the schema itself, and its JSON in a text."""
    text = bytes(schema).decode()
    return str(msgspec.json.decode(text)) if text.startswith('"') else text

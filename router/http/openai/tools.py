"""The tools of a chat: which ones the model is shown, and which calls a client demands.

A demanded call is a grammar, in the notation that `tool_calls` reads: each call as it would stand in any answer, its
arguments by the function's own JSON schema. So is an answer that may call, and keeps to a schema where it does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixfleet.errors import InvalidRequest
from router.http.openai.closed_schema import closed
from router.http.openai.requests import ChatRequest
from router.http.openai.tool_calls import CALL_CLOSE, CALL_OPEN

_NO_PARAMETERS: Mapping[str, Any] = {"additionalProperties": False}
_SCHEMA = "response_format.json_schema.schema"
_END = json.dumps(f"}}\n{CALL_CLOSE}")
"""Behind the arguments."""
_SPACING: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As templates show calls to the model; small models get lost in free white space."""


def shown_tools(request: ChatRequest) -> Sequence[dict[str, Any]]:
    """Those that the chat template gets. Raises InvalidRequest."""
    tools = _checked(request)
    return [] if request.tool_choice == "none" else tools


def demands_call(request: ChatRequest) -> bool:
    """Whether an answer without a call is none."""
    return request.tool_choice not in (None, "none", "auto")


def call_grammar(request: ChatRequest, or_schema: str = "") -> str:
    """What an answer that calls keeps to, in Lark's notation. Raises InvalidRequest.

    One call of the function that is named; where any will do, one or more, unless parallel_tool_calls is false.
    `or_schema`: a JSON schema, which the answer may keep to instead.
    """
    tools = _checked(request)
    name = _named(request)
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not functions:
        which = "one, and there are no tools" if name is None else f"one of {name!r}, which is none of tools"
        raise InvalidRequest(f"tool_choice demands a call: {which}", field="tool_choice")
    choices = []
    for number, function in enumerate(functions):
        beginning = f'{CALL_OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        choices.append(f"{json.dumps(beginning)} arguments_{number}")
    try:
        rules = [f"arguments_{number}: %json {_arguments(function)}" for number, function in enumerate(functions)]
        if or_schema:
            rules.append(f"answer: %json {_spaced(json.loads(or_schema))}")
    except RecursionError:  # the body was read with fewer calls on the stack
        raise InvalidRequest("the body is not served: it is nested too deeply") from None
    except ValueError as error:  # of a number with thousands of digits
        raise InvalidRequest(f"the schema cannot be read: {error}", field=_SCHEMA) from None
    is_one = name is not None or request.parallel_tool_calls is False
    return "\n".join(
        (
            "start: calls | answer" if or_schema else "start: calls",
            "calls: call" if is_one else 'calls: call ("\\n" call)*',
            f"call: ({' | '.join(choices)}) {_END}",
            *rules,
        )
    )


def _arguments(function: Mapping[str, Any]) -> str:
    """The JSON schema of a call's arguments. Keywords that cannot be enforced are passed over, unless it is strict."""
    schema = {"type": "object", **(function.get("parameters") or _NO_PARAMETERS)}
    return _spaced(schema, lenient=not function.get("strict"))


def _spaced(schema: Any, **options: bool) -> str:
    return closed(json.dumps(schema | {"x-guidance": {**_SPACING, **options}} if isinstance(schema, dict) else schema))


def _named(request: ChatRequest) -> str | None:
    """The function that must be called; None: any."""
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}',
            field="tool_choice",
        )
    return name


def _checked(request: ChatRequest) -> Sequence[dict[str, Any]]:
    """All tools, each a function with a name. Raises InvalidRequest."""
    tools = request.tools or []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function":
            raise InvalidRequest(f"{where}.type must be 'function'; got {tool['type']!r}", field=f"{where}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where}.function must be an object", field=f"{where}.function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"{where}.function.name must be a text", field=f"{where}.function.name")
        if not isinstance(function.get("parameters"), dict | None):
            field = f"{where}.function.parameters"
            raise InvalidRequest(f"{field} must be an object: a JSON schema", field=field)
    return tools

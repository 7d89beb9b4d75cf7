"""The tools of a chat: which ones the model is shown, and which calls a client demands.

A demanded call is a grammar, in the notation that `tool_calls` reads: each call as it would stand in any answer, its
arguments by the function's own JSON schema.
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
_SPACING: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As templates show calls to the model; small models get lost in free white space."""


def shown_tools(request: ChatRequest) -> Sequence[dict[str, Any]]:
    """Those that the chat template gets. Raises InvalidRequest."""
    tools = _checked(request)
    return [] if request.tool_choice == "none" else tools


def demands_call(request: ChatRequest) -> bool:
    """Whether an answer without a call is none."""
    return request.tool_choice not in (None, "none", "auto")


def call_grammar(request: ChatRequest) -> str:
    """What an answer that must call keeps to, in Lark's notation. Raises InvalidRequest.

    One call of the function that is named; where any will do, one or more, unless parallel_tool_calls is false.
    """
    tools = _checked(request)
    name = _named(request)
    demanded = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not demanded:
        which = "one, and there are no tools" if name is None else f"one of {name!r}, which is none of tools"
        raise InvalidRequest(f"tool_choice demands a call: {which}", field="tool_choice")
    is_one = name is not None or request.parallel_tool_calls is False
    choices = []
    rules = []
    for number, function in enumerate(demanded):
        beginning = f'{CALL_OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        choices.append(f"{json.dumps(beginning)} arguments_{number}")
        schema = {"type": "object", **(function.get("parameters") or _NO_PARAMETERS), "x-guidance": _SPACING}
        rules.append(f"arguments_{number}: %json {closed(json.dumps(schema))}")
    end = json.dumps(f"}}\n{CALL_CLOSE}")
    return "\n".join(
        ["start: call" if is_one else 'start: call ("\\n" call)*', f"call: ({' | '.join(choices)}) {end}", *rules]
    )


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

"""From requests for responses to requests for chats, and the names of fields at fault back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from radixfleet.errors import InvalidRequest
from router.http.openai.requests import (
    ChatRequest,
    ContentPart,
    JsonFormat,
    Message,
    NamedSchema,
    Sampling,
    SchemaFormat,
    TextFormat,
)
from router.http.openai.responses.request import InputItem, InputPart, NamedSchemaFormat, ResponsesRequest

_LOGPROBS = "message.output_text.logprobs"
_WHOLE = "nothing is stored here, so send the whole conversation as input"
_TEXT_ALONE = "the models served here write text alone"
_INSTEAD: Mapping[str, str] = {
    "previous_response_id": _WHOLE,
    "conversation": _WHOLE,
    "prompt": "nothing is stored here, so send its text as instructions or input",
    "background": "nothing is stored here, so stream the answer or wait for it",
    "response_format": "send text.format",
    "max_tokens": "send max_output_tokens",
    "max_completion_tokens": "send max_output_tokens",
    "n": "send a request for each answer",
    "logprobs": f"send include: [{_LOGPROBS!r}]",
    "functions": "send tools",
    "audio": _TEXT_ALONE,
    "modalities": _TEXT_ALONE,
    "web_search_options": "nothing is searched here",
}
"""What to do in the place of a field."""
_NAMES: Mapping[str, str] = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
"""What a chat and a response call the same thing, in texts and as fields; the first that fits."""
_NAMED = re.compile(rf"(?<!\w)'[^']*'|{'|'.join(map(re.escape, _NAMES))}")
"""A name of a chat's, or what is quoted: those words are the client's own."""
_INPUT = re.compile(r"(messages|prompt)\b.*")
"""An item is not the message of its number."""
_FLAT = re.compile(r"(tools\[\d+\])\.function\b")
_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_of(request: ResponsesRequest) -> ChatRequest:
    """The chat that it comes to. Raises InvalidRequest, in the client's own names."""
    _refuse(request)
    tells_logprobs = _LOGPROBS in (request.include or ())
    return ChatRequest(
        **{name: getattr(request, name) for name in Sampling.__struct_fields__},
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        response_format=_format(request),
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        logprobs=tells_logprobs,
        top_logprobs=request.top_logprobs if tells_logprobs else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def in_responses_names(error: InvalidRequest) -> InvalidRequest:
    """The same error of a chat, with the field and the text in the words of this API."""
    text, field = (_NAMED.sub(lambda name: _NAMES.get(name[0], name[0]), words) for words in (str(error), error.field))
    field = "input" if _INPUT.fullmatch(field) else field
    return InvalidRequest(_FLAT.sub(r"\1", text), field=_FLAT.sub(r"\1", field), **error.metadata)


def _refuse(request: ResponsesRequest) -> None:
    for name, instead in _INSTEAD.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            raise InvalidRequest(f"{name} is not served: {instead}", field=name)
    if request.truncation == "auto":
        raise InvalidRequest("truncation must be 'disabled': no input is shortened here", field="truncation")


def _messages(request: ResponsesRequest) -> list[Message]:
    messages = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    num_before = len(messages)
    for index, item in enumerate(request.input):
        _add(item, f"input[{index}]", messages)
    if len(messages) == num_before:
        raise InvalidRequest("input has nothing but reasoning", field="input")
    return messages


def _add(item: InputItem, path: str, messages: list[Message]) -> None:
    """One item more. Calls belong to the assistant's message before them: so the model wrote them, and so it is
    found in the cache. Text behind calls belongs to theirs: a chat's turn has its text in one, before all calls.
    """
    if item.type in (None, "message"):
        if item.role is None:
            raise _stored(path) if item.type is None and item.id is not None else _missing(f"{path}.role")
        content = _content(item.content, f"{path}.content")
        if item.role == "assistant" and messages and messages[-1].tool_calls:
            messages[-1].content = [*_parts(messages[-1].content), *_parts(content)]
        else:
            messages.append(Message(role=item.role, content=content))
    elif item.type == "function_call":
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant"))
        calls = messages[-1].tool_calls = messages[-1].tool_calls or []
        calls.append(_call(item, path))
    elif item.type == "function_call_output":
        call_id = _needed(item.call_id, f"{path}.call_id")
        messages.append(Message(role="tool", tool_call_id=call_id, content=_content(item.output, f"{path}.output")))
    elif item.type == "item_reference":
        raise _stored(path)
    elif item.type != "reasoning":
        raise InvalidRequest(
            f"{path} is {item.type!r}: items may be message, function_call, function_call_output and reasoning",
            field=f"{path}.type",
        )


def _call(item: InputItem, path: str) -> dict[str, Any]:
    if isinstance(item.arguments, dict):
        raise InvalidRequest(f"{path}.arguments must be JSON in a text", field=f"{path}.arguments")
    function = {
        "name": _needed(item.name, f"{path}.name"),
        "arguments": _needed(item.arguments, f"{path}.arguments"),
    }
    return {"id": _needed(item.call_id, f"{path}.call_id"), "type": "function", "function": function}


def _content(content: str | list[InputPart] | dict[str, Any] | None, path: str) -> str | list[ContentPart]:
    if content is None:
        raise _missing(path)
    if isinstance(content, dict):
        raise InvalidRequest(f"{path} must be a text, or a list of parts", field=path)
    if isinstance(content, str):
        return content
    return [ContentPart("text", _text(part, f"{path}[{index}]")) for index, part in enumerate(content)]


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    return content if isinstance(content, list) else [ContentPart("text", content)] if content else []


def _text(part: InputPart, path: str) -> str:
    if part.type is None:
        raise _missing(f"{path}.type")
    if part.type == "refusal":
        return _needed(part.refusal, f"{path}.refusal")
    if part.type not in _TEXT_PARTS:
        raise InvalidRequest(f"{path} is {part.type!r}: the models served here read text alone", field=f"{path}.type")
    return _needed(part.text, f"{path}.text")


def _format(request: ResponsesRequest) -> TextFormat | JsonFormat | SchemaFormat | None:
    wanted = request.text.format if request.text else None
    if isinstance(wanted, NamedSchemaFormat):
        return SchemaFormat(NamedSchema(wanted.schema, wanted.name, wanted.strict))
    return wanted


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": tool.get("type", "function"), "function": function}


def _tool_choice(choice: Any) -> Any:
    """In the form of a chat's, which says the rest."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "name": ...}', field="tool_choice"
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _needed(value: str | None, path: str) -> str:
    if value is None:
        raise _missing(path)
    return value


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is missing or null", field=path)


def _stored(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path} refers to an item: nothing is stored here, so send the item itself", field=path)

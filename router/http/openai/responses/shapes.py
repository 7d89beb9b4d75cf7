"""What clients get from /v1/responses, in OpenAI's published shape: a response, its items, and a stream's events."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from router.http.openai.responses.request import TextOptions

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Logprobs: TypeAlias = Annotated[
    msgspec.Raw, Meta(extra_json_schema={"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}})
]
"""A `TokenLogprob` for each token. They are encoded when they come: as objects they take four times the memory."""
NO_LOGPROBS = msgspec.Raw(b"[]")


class InputTokensDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Found in the worker's cache; 0 where the engine does not tell."""
    cache_write_tokens: Literal[0] = 0
    """OpenAI bills them; no engine here tells them."""


class OutputTokensDetails(msgspec.Struct):
    """Of the answer's tokens."""

    reasoning_tokens: Literal[0] = 0
    """All text is the answer's."""


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(msgspec.Struct, tag="output_text"):
    """The text of a message."""

    text: str
    logprobs: Logprobs = msgspec.field(default_factory=lambda: NO_LOGPROBS)
    """Empty unless `include` asks for them."""
    annotations: list[Any] = []
    """Empty."""


class OutputMessage(msgspec.Struct, tag="message", kw_only=True):
    """Text of the model's."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    """None while nothing has come, then one."""
    role: Literal["assistant"] = "assistant"


class OutputFunctionCall(msgspec.Struct, tag="function_call", kw_only=True):
    """One call that the model asks for."""

    id: str
    status: ItemStatus
    call_id: str
    """Belongs into the item with what the function returned."""
    name: str
    arguments: str
    """JSON, as the model wrote it."""


OutputItem: TypeAlias = OutputMessage | OutputFunctionCall


class IncompleteDetails(msgspec.Struct):
    """Why there is no more."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    """Why there is no whole answer."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class Response(msgspec.Struct, kw_only=True):
    """POST /v1/responses, and what most events of its streams tell."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    """None until the answer has ended."""
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    text: TextOptions
    tools: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})]
    tool_choice: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": ["string", "object"]})]
    parallel_tool_calls: bool
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    store: Literal[False] = False
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: None = None
    reasoning: None = None
    max_tool_calls: None = None
    service_tier: Literal["default"] = "default"


class _OfStream(msgspec.Struct, kw_only=True):
    sequence_number: int = 0
    """Counts the events of a stream."""


class _OfResponse(_OfStream, kw_only=True):
    response: Response


class ResponseCreated(_OfResponse, tag="response.created"):
    """The first event, which comes with the first token."""


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    """The second."""


class ResponseCompleted(_OfResponse, tag="response.completed"):
    """The last, where the model came to an end."""


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    """The last, where the limit cut the answer."""


class ResponseFailed(_OfResponse, tag="response.failed"):
    """The last, where something went wrong after the first."""


class _OfItem(_OfStream, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_OfItem, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_OfItem, tag="response.output_item.done"):
    """An item is whole."""


class _OfPart(_OfStream, kw_only=True):
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    """A message has one part."""


class ContentPartAdded(_OfPart, tag="response.content_part.added", kw_only=True):
    """The text of a message begins."""

    part: OutputText


class OutputTextDelta(_OfPart, tag="response.output_text.delta", kw_only=True):
    """More text."""

    delta: str
    logprobs: Logprobs = msgspec.field(default_factory=lambda: NO_LOGPROBS)


class OutputTextDone(_OfPart, tag="response.output_text.done", kw_only=True):
    """All of it."""

    text: str
    logprobs: Logprobs = msgspec.field(default_factory=lambda: NO_LOGPROBS)
    """Empty: the deltas have told them, and the item and the response tell them again."""


class ContentPartDone(_OfPart, tag="response.content_part.done", kw_only=True):
    """All of it, once more; without log probabilities, too."""

    part: OutputText


class _OfCall(_OfStream, kw_only=True):
    item_id: str
    output_index: int


class FunctionCallArgumentsDelta(_OfCall, tag="response.function_call_arguments.delta", kw_only=True):
    """More of a call's arguments."""

    delta: str


class FunctionCallArgumentsDone(_OfCall, tag="response.function_call_arguments.done", kw_only=True):
    """All of them."""

    name: str
    arguments: str


ItemEvent: TypeAlias = (
    OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
    | OutputItemDone
)
ResponseEvent: TypeAlias = (
    ResponseCreated | ResponseInProgress | ItemEvent | ResponseCompleted | ResponseIncomplete | ResponseFailed
)

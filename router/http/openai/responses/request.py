"""What clients send to /v1/responses. Fields that are not named here are ignored; some are named to be refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from radixfleet.sampling import MAX_TOKENS
from radixfleet.types import MAX_LOGPROBS
from router.http.openai.requests import JsonFormat, Sampling, TextFormat

_MetadataKey: TypeAlias = Annotated[str, Meta(max_length=64)]
_MetadataValue: TypeAlias = Annotated[str, Meta(max_length=512)]


class InputPart(msgspec.Struct):
    """Part of a message, or of what a function returned; only text is served."""

    type: str | None = None
    """"input_text", "output_text", "text" or "refusal". It is needed, which translation tells."""
    text: str | None = None
    refusal: str | None = None
    """The text of a refusal."""


class InputItem(msgspec.Struct, kw_only=True):
    """One item of a conversation. Which fields it needs, and what is in them, is a matter of its type."""

    id: str | None = None
    """Alone, it refers to an item that was stored: that is refused."""
    type: str | None = None
    """"message" where there is none; "function_call", "function_call_output"; "reasoning" is passed over."""
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    """Of the function that was called."""
    arguments: str | dict[str, Any] | None = None
    """Of the call, as JSON in a text. Only items that are refused have objects here, and in the output."""
    output: str | list[InputPart] | dict[str, Any] | None = None
    """What the function returned."""


class NamedSchemaFormat(msgspec.Struct, tag="json_schema"):
    """JSON that the schema allows."""

    schema: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    name: str = ""
    strict: bool | None = None
    description: str | None = None
    """Sent back, and changes nothing."""


class TextOptions(msgspec.Struct):
    """How the text of an answer looks."""

    format: TextFormat | JsonFormat | NamedSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Sent back, and changes nothing."""


class ResponsesRequest(Sampling, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    """What the user says, or the whole conversation: nothing is stored here."""
    instructions: str | None = None
    """Comes before the input, as a message of the system's."""
    max_output_tokens: Annotated[int, Meta(le=MAX_TOKENS, extra_json_schema={"minimum": 1})] | None = None
    """What is too little is told in translation."""
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions alone."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """"none", "auto", "required", or the one function that must be called."""
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    """"message.output_text.logprobs" tells log probabilities. What else there is belongs to tools that are refused."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Of the likeliest tokens, where log probabilities are told."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)] | None = None
    """Sent back as it is; so are the three below, which change nothing."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    """Taken, and nothing is stored."""
    background: bool | None = None
    """true is refused."""
    truncation: Literal["auto", "disabled"] | None = None
    """"auto" is refused."""
    previous_response_id: Any = None
    """Refused, as are all below."""
    conversation: Any = None
    prompt: Any = None
    response_format: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    logprobs: Any = None
    functions: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None

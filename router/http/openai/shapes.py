"""What clients get for chats, completions and token ids, in OpenAI's published shape: no field that it lacks."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Found in the worker's cache."""


class Usage(msgspec.Struct):
    """Tokens of a request, in all its completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    """Left out where the engine does not tell."""


class TopLogprob(msgspec.Struct):
    """A token that might have stood in a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of an answer, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of the tokens of one piece of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The same in the older form: one entry a token in each list."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    """None for the first token of a prompt, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = []


class FunctionCall(msgspec.Struct):
    """What is to be called."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct):
    """One call that the model asks for."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """What is new of what is to be called."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What is new of a call. The first has the name, the id and the type; the arguments of all together are JSON."""

    index: int
    """Of the call, among those of the answer."""
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What is new in an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatPart(msgspec.Struct):
    """A piece of one choice, in a stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatMessage(msgspec.Struct):
    """A whole answer."""

    content: str | None
    """None where the answer is nothing but calls."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of the n answers."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class CompletionPart(msgspec.Struct):
    """A piece of one choice in a stream, or a whole one, which is its last piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatAnswer(msgspec.Struct):
    """POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class CompletionAnswer(msgspec.Struct):
    """POST /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[CompletionPart]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"


class ChatChunk(msgspec.Struct):
    """One event of a stream of a chat."""

    id: str
    created: int
    model: str
    choices: list[ChatPart]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChunk(msgspec.Struct):
    """One event of a stream of completions."""

    id: str
    created: int
    model: str
    choices: list[CompletionPart]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class TokenizeAnswer(msgspec.Struct):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    """POST /detokenize."""

    prompt: str

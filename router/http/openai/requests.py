"""What clients send, as OpenAI and the engines of this field write it. The types are the validation and, as JSON
Schema, the published document. Fields that are not named here are ignored; some are named to be refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from radixfleet.sampling import MAX_BIAS, MAX_BIASED_IDS, MAX_COMPLETIONS, MAX_STOP_STRINGS, MAX_TOKENS
from radixfleet.types import MAX_LOGPROBS

MAX_PROMPTS = 1024
"""In one request for completions."""
MAX_TOKEN_ID = 2**32 - 1
MAX_SEED = 2**64 - 1
"""More than msgspec bounds: it is checked in translation."""

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Limit: TypeAlias = Annotated[int, Meta(le=MAX_TOKENS, extra_json_schema={"minimum": 0})]
"""What is too little is told in translation, which knows when 0 is not."""
_Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
_TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]


class StreamOptions(msgspec.Struct):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None
    """One last event with the usage."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every event."""


class NamedSchema(msgspec.Struct):
    """The schema of `response_format`."""

    schema: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    name: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag="text"):
    """Anything."""


class JsonFormat(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, tag="json_schema"):
    """JSON that the schema allows."""

    json_schema: NamedSchema


class StructuredOutputs(msgspec.Struct):
    """vLLM's form; one of them."""

    json: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": ["object", "string", "null"]})] = msgspec.field(
        default_factory=lambda: msgspec.Raw(b"null")
    )
    """A JSON Schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """In Lark's notation."""
    json_object: bool | None = None
    """Any JSON object."""


class Sampling(msgspec.Struct, kw_only=True):
    """What all requests for answers have in common."""

    model: str | None = None
    """OpenAI demands it; here it may be left out while one model is served, as most engines of this field allow."""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), extra_json_schema={"maximum": MAX_SEED})] | None = None
    """As over gRPC, 0 to 2^64 - 1; one below 0 is that seed modulo 2^64."""
    min_tokens: _Count | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]],
            Meta(max_length=MAX_BIASED_IDS),
        ]
        | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's way to say what the answer has to keep to."""
    guided_json: Any = None
    """Refused, as are the five below: see structured_outputs."""
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None
    regex: Any = None
    ebnf: Any = None
    stream: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Higher runs first."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""


class ChoicesRequest(Sampling, kw_only=True):
    """What requests for completions and for chats have in common: their answers are choices."""

    n: Annotated[int, Meta(ge=1, le=MAX_COMPLETIONS)] | None = None
    max_tokens: _Limit | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(ChoicesRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | _TokenId | list[_TokenId]], Meta(min_length=1)]
    """Text, texts, token ids, or lists of token ids."""
    best_of: Annotated[int, Meta(ge=1)] | None = None
    """Not more than n: nothing is generated only to be thrown away."""
    echo: bool | None = None
    """Begin the answer with the prompt."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: str | None = None
    """Refused: the models served here do not fill in."""


class ContentPart(msgspec.Struct):
    """Part of a message; only text is served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """"developer" is OpenAI's later name for "system", and is taken for that."""
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(ChoicesRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Limit | None = None
    """Takes the place of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """"none", "auto", "required", or the one function that must be called."""
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    modalities: list[str] | None = None
    """"text" alone."""
    functions: Any = None
    """Refused: OpenAI's older form of tools."""
    audio: Any = None
    """Refused."""
    web_search_options: Any = None
    """Refused."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: the ids of a prompt, or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize: the text of ids."""

    model: str | None = None
    tokens: list[_TokenId]

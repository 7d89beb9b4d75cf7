"""Requests for the wire from plain Python values. What the wire cannot carry is refused here, with the field's name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np

from radixfleet import convert
from radixfleet.errors import InvalidRequest
from radixfleet.types import ChatMessage, ChatPrompt, GrammarKind, TokenArray
from radixfleet.v1 import inference_pb2

PromptInput: TypeAlias = str | Sequence[int] | TokenArray | Sequence[ChatMessage | Mapping[str, str]] | ChatPrompt
"""Text, token ids, or chat messages ({"role": ..., "content": ...} will do)."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen and when a generation ends. What is absent has the default that inference.proto names."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int
    prompt_logprobs: int
    n: int
    json_schema: str | Mapping[str, Any]
    """One of this and the three below, at most: what the answer must be like."""
    json_object: bool
    regex: str
    lark: str


class RequestOptions(SamplingOptions, total=False):
    """All of a request but its prompt."""

    request_id: str
    model: str
    cache_salt: str
    priority: int
    lease_id: str
    resume: bool


_SAMPLING_NAMES = frozenset(SamplingOptions.__annotations__)
_GRAMMAR_NAMES = frozenset(kind.value for kind in GrammarKind)


def generate_request(prompt: PromptInput, options: RequestOptions) -> inference_pb2.GenerateRequest:
    """The message of Inference.Generate. Raises InvalidRequest."""
    sampling = {name: value for name, value in options.items() if name in _SAMPLING_NAMES and value is not None}
    rest = {name: value for name, value in options.items() if name not in _SAMPLING_NAMES and value is not None}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    grammar = {name: sampling.pop(name) for name in _GRAMMAR_NAMES & sampling.keys()}
    if grammar:
        sampling["grammar"] = _grammar(grammar)
    for index, text in enumerate(_strings(sampling.get("stop"))):
        utf8(text, f"sampling.stop[{index}]")
    for name, value in rest.items():
        if isinstance(value, str):
            utf8(value, name)
    message = prompt_to_pb(prompt)
    try:
        return inference_pb2.GenerateRequest(
            prompt=message,
            sampling=inference_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]  # names as in the TypedDict
            **rest,  # type: ignore[arg-type]
        )
    except (TypeError, ValueError) as error:
        raise _refusal(sampling, rest, error) from error


def _refusal(sampling: Mapping[str, Any], rest: Mapping[str, Any], error: Exception) -> InvalidRequest:
    """protobuf does not say which field it refused."""
    for message, options, path in (
        (inference_pb2.SamplingParams, sampling, "sampling."),
        (inference_pb2.GenerateRequest, rest, ""),
    ):
        for name, value in options.items():
            try:
                message(**{name: value})
            except (TypeError, ValueError) as reason:
                return InvalidRequest(f"{path}{name} cannot be sent: {reason}", field=f"{path}{name}")
    return InvalidRequest(f"the request cannot be sent: {error}")


def _grammar(options: dict[str, Any]) -> inference_pb2.Grammar:
    if len(options) > 1:
        names = ", ".join(sorted(options))
        raise InvalidRequest(f"an answer can have one grammar; {names} are set", field="sampling.grammar")
    ((name, value),) = options.items()
    field = f"sampling.grammar.{name}"
    if name == GrammarKind.JSON_OBJECT:
        return inference_pb2.Grammar(json_object=bool(value))
    if name == GrammarKind.JSON_SCHEMA and isinstance(value, Mapping):
        value = _json(value, field)
    return inference_pb2.Grammar(**{name: utf8(value, field)})  # type: ignore[arg-type]  # a field's name


def _json(value: object, field: str) -> str:
    try:
        return utf8(json.dumps(value, ensure_ascii=False), field)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} cannot be written as JSON: {error}", field=field) from error


def _strings(value: object) -> Sequence[str]:
    return value if isinstance(value, Sequence) else ()


def prompt_to_pb(prompt: PromptInput) -> inference_pb2.Prompt:
    """The message of a prompt; token ids travel packed. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return inference_pb2.Prompt(text=utf8(prompt, "prompt.text"))
    if isinstance(prompt, ChatPrompt):
        message = _chat(prompt.messages, "prompt.chat.messages", add_generation_prompt=prompt.add_generation_prompt)
        message.chat.tools_json = _json(prompt.tools, "prompt.chat.tools") if prompt.tools else ""
        message.chat.variables_json = _json(prompt.variables, "prompt.chat.variables") if prompt.variables else ""
        return message
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], ChatMessage | Mapping):
        return _chat(prompt, "prompt.chat.messages", add_generation_prompt=None)
    return inference_pb2.Prompt(token_ids=convert.pack_tokens(token_array(prompt, "prompt.token_ids")))


def token_array(ids: Any, field: str) -> TokenArray:
    """`ids` as an array of token ids. Raises InvalidRequest for what is none."""
    try:
        given = np.asarray(ids)
        if given.ndim == 1 and (given.dtype.kind in "iu" or not len(given)):
            if len(given) and (given.min() < 0 or given.max() >= 2**32):
                raise InvalidRequest(f"{field} must be from 0 to 2^32 - 1", field=field)
            return given.astype(np.uint32)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequest(f"{field} cannot be read as token ids: {error}", field=field) from error
    raise InvalidRequest(f"{field} must be one flat sequence of whole numbers", field=field)


def _chat(messages: Any, field: str, *, add_generation_prompt: bool | None) -> inference_pb2.Prompt:
    chat = inference_pb2.Chat(add_generation_prompt=add_generation_prompt)
    for index, message in enumerate(messages):
        path = f"{field}[{index}]"
        extra = ""
        if isinstance(message, ChatMessage):
            role, content = message.role, message.content
            extra = _json(message.extra, f"{path}.extra") if message.extra else ""
        elif isinstance(message, Mapping) and set(message) == {"role", "content"}:
            role, content = message["role"], message["content"]
        else:
            raise InvalidRequest(f"{path} must have role and content, and nothing else", field=path)
        chat.messages.add(role=utf8(role, f"{path}.role"), content=utf8(content, f"{path}.content"), extra_json=extra)
    return inference_pb2.Prompt(chat=chat)


def utf8(value: Any, field: str) -> str:
    """`value`, where it is text that UTF-8 can carry; a lone surrogate cannot be. Raises InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be text, not {type(value).__name__}", field=field)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} holds a lone surrogate at character {error.start}", field=field) from error
    return value

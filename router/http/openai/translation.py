"""From OpenAI's requests to the fleet's own, and the names of fields at fault back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from radixfleet import convert
from radixfleet.errors import InvalidRequest
from radixfleet.v1 import inference_pb2
from router.http.openai.constraints import grammar, refuse_other_names
from router.http.openai.requests import (
    MAX_PROMPTS,
    MAX_SEED,
    ChatRequest,
    ChoicesRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
)
from router.http.openai.tools import shown_tools

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default for completions. Less where the context leaves less: see `Generating`."""

_MAX_SAMPLING_BYTES = 16 * 1024**2
"""Of all prompts of a request: each has a copy of the parameters, and a grammar may have 256 KiB."""

_NAMES = (
    ("sampling.min_new_tokens", "min_tokens"),
    ("sampling.prompt_logprobs", "logprobs"),
    ("sampling.", ""),
    ("prompt.chat.tools_json", "tools"),
    ("prompt.chat.variables_json", "chat_template_kwargs"),
    ("prompt.chat.messages", "messages"),
    ("prompt.chat", "messages"),
    ("prompt.token_ids", "prompt"),
    ("min_new_tokens", "min_tokens"),
)
"""What .proto and OpenAI call the same thing; the first that fits."""
_LIMITS = ("sampling.max_new_tokens", "max_new_tokens")
_GRAMMAR_KINDS = (".json_schema", ".json_object", ".regex", ".lark.json", ".lark", "")
_GRAMMARS = tuple(f"sampling.grammar{kind}" for kind in _GRAMMAR_KINDS)


def in_openai_names(error: InvalidRequest, *, constraint: str = "response_format", limit: str = "") -> InvalidRequest:
    """The same error, with the field and the text in the words of the client.

    `constraint` and `limit`: its names for what the answer has to keep to, and for how long it may be; see `Plan`.
    """
    text, field = str(error), error.field
    limits = ((name, limit or "max_tokens") for name in _LIMITS)
    for ours, theirs in (*((name, constraint) for name in _GRAMMARS), *limits, *_NAMES):
        text = text.replace(ours, theirs)
        if field.startswith(ours):
            field = theirs + field.removeprefix(ours)
    return InvalidRequest(text, field=field, **error.metadata)


def completion_requests(request: CompletionRequest) -> list[inference_pb2.GenerateRequest]:
    """One for each prompt. Raises InvalidRequest."""
    if request.suffix:
        raise InvalidRequest("suffix is not served: leave it out, or put the text into the prompt", field="suffix")
    if (request.best_of or 1) > (request.n or 1):
        raise InvalidRequest("best_of must not be more than n: every completion is returned", field="best_of")
    sampling = _sampling(request)
    max_tokens = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens < (0 if request.echo else 1):
        raise InvalidRequest("max_tokens must be 1 or more; 0 goes together with echo alone", field="max_tokens")
    sampling.max_new_tokens = max(1, max_tokens)
    if request.logprobs is not None:
        sampling.logprobs = request.logprobs
        if request.echo:
            sampling.prompt_logprobs = request.logprobs
    prompts, size = _prompts(request.prompt), sampling.ByteSize()
    if len(prompts) * size > _MAX_SAMPLING_BYTES:
        raise InvalidRequest(
            f"prompt has {len(prompts)} prompts, and each would take {size} bytes of parameters with it: send fewer "
            "at a time",
            field="prompt",
        )
    return [_generate(request, prompt, sampling) for prompt in prompts]


def chat_request(request: ChatRequest) -> inference_pb2.GenerateRequest:
    """Without max_new_tokens where the client sets no limit. Raises InvalidRequest."""
    sampling = _sampling(request)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if max_tokens is not None:
        if max_tokens < 1:
            name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequest(f"{name} must be 1 or more", field=name)
        sampling.max_new_tokens = max_tokens
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    if request.logprobs:
        sampling.logprobs = request.top_logprobs or 0
    return _generate(request, inference_pb2.Prompt(chat=_chat(request, shown_tools(request))), sampling)


def tokenize_prompt(request: TokenizeRequest) -> inference_pb2.Prompt:
    """What is to be tokenized. Raises InvalidRequest."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give prompt or messages, one of them", field="prompt")
    if request.prompt is not None:
        return inference_pb2.Prompt(text=request.prompt)
    return inference_pb2.Prompt(chat=_chat(request, request.tools or []))


def _generate(
    request: ChoicesRequest, prompt: inference_pb2.Prompt, sampling: inference_pb2.SamplingParams
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=request.model or "",
        prompt=prompt,
        sampling=sampling,
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
    )


def _sampling(request: ChoicesRequest) -> inference_pb2.SamplingParams:
    refuse_other_names(request)
    bias = {int(token_id): value for token_id, value in (request.logit_bias or {}).items()}
    if bias and max(bias) >= 2**32:
        raise InvalidRequest("logit_bias names token ids, which are below 2^32", field="logit_bias")
    if request.seed is not None and request.seed > MAX_SEED:
        raise InvalidRequest("seed must be at most 2^64 - 1", field="seed")
    return inference_pb2.SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=None if request.seed is None else request.seed % 2**64,
        n=request.n,
        min_new_tokens=request.min_tokens,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=bias,
        grammar=grammar(request),
    )


def _prompts(given: str | list[str | int | list[int]]) -> list[inference_pb2.Prompt]:
    if isinstance(given, str):
        return [inference_pb2.Prompt(text=given)]
    if isinstance(given[0], int):
        return [_of_ids(given, "prompt")]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(given)} prompts; at most {MAX_PROMPTS} are allowed", field="prompt")
    kind = type(given[0])
    prompts = []
    for index, item in enumerate(given):
        if type(item) is not kind or isinstance(item, int):
            raise _mixed()
        path = f"prompt[{index}]"
        prompts.append(inference_pb2.Prompt(text=item) if isinstance(item, str) else _of_ids(item, path))
    return prompts


def _of_ids(ids: Sequence[Any], field: str) -> inference_pb2.Prompt:
    if not ids:
        raise InvalidRequest(f"{field} is empty", field=field)
    try:
        tokens = np.array(ids, dtype=np.uint32)
    except (TypeError, ValueError, OverflowError):
        raise _mixed() from None
    return inference_pb2.Prompt(token_ids=convert.pack_tokens(tokens))


def _mixed() -> InvalidRequest:
    return InvalidRequest("prompt must be text, a list of texts, token ids, or a list of token ids", field="prompt")


def _chat(request: ChatRequest | TokenizeRequest, tools: Sequence[dict[str, Any]]) -> inference_pb2.Chat:
    try:
        return inference_pb2.Chat(
            messages=[_message(message, f"messages[{index}]") for index, message in enumerate(request.messages or ())],
            add_generation_prompt=request.add_generation_prompt,
            tools_json=_json(tools),
            variables_json=_json(request.chat_template_kwargs),
        )
    except RecursionError:  # the body was read with fewer calls on the stack
        raise InvalidRequest("the body is not served: it is nested too deeply") from None


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode() if value else ""


def _message(message: Message, path: str) -> inference_pb2.ChatMessage:
    extra: dict[str, Any] = {
        name: value
        for name in ("name", "tool_call_id", "reasoning_content")
        if (value := getattr(message, name)) is not None
    }
    if message.tool_calls is not None:
        extra["tool_calls"] = [_with_open_arguments(call) for call in message.tool_calls]
    role = "system" if message.role == "developer" else message.role
    return inference_pb2.ChatMessage(role=role, content=_text(message, path), extra_json=_json(extra))


def _text(message: Message, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if not (message.role == "assistant" and (message.tool_calls or message.reasoning_content)):
            raise InvalidRequest(
                f"{path}.content is missing or null: give it text; only an assistant's message with tool_calls or "
                "reasoning_content may do without",
                field=f"{path}.content",
            )
        return ""
    texts = []
    for index, part in enumerate(message.content):
        field = f"{path}.content[{index}]"
        if part.type != "text":
            raise InvalidRequest(f"{field} is {part.type!r}: the models served here read text alone", field=field)
        if part.text is None:
            raise InvalidRequest(f"{field}.text is missing or null", field=f"{field}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _with_open_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI sends the arguments of a call as JSON in a string; chat templates expect the object itself."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}

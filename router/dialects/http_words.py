"""Requests in the words of OpenAI's HTTP, and what each kind of engine behind it knows beyond them.

                       OpenAI's own   vLLM   SGLang   llama.cpp     of the sampling parameters
top_k, min_p                -          x       x         x
repetition_penalty          -          x       x         x (repeat_penalty)
ignore_eos                  -          x       x         x
min_tokens                  -          x       x         -
stop_token_ids              -          x       x         -
skip_special_tokens         -          x       x         -
n                           x          x       x         -
regex, Lark                 -        x x     x -         -          Lark with JSON schemas in it: none
logprobs by token id        -          x       -         -
tokens of the answer        -          x       -         -          without them nobody can go on with an answer
cache_salt                  -          x       -         -

Engines ignore what they do not know without a word, so what is not in the table is not sent to them at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import msgspec

from radixfleet.errors import InvalidRequest
from radixfleet.types import GrammarKind, SamplingParams
from radixfleet.v1 import inference_pb2
from router.dialects.needs import WORDS

_MAX_SEED = 2**31 - 1
"""Some engines take no more than a signed 32-bit number."""

_SAME = {name: name for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos")}
_MORE = _SAME | {"min_new_tokens": "min_tokens"} | {name: name for name in ("stop_token_ids", "skip_special_tokens")}
_PLAIN = frozenset({"sampling.seed", "sampling.n"})


class CompletionJson(Enum):
    """How an engine is told to write JSON where the prompt is no chat."""

    AS_CHAT = auto()
    """By `response_format`."""
    BY_SCHEMA = auto()
    """By the field `json_schema`."""
    NOT_AT_ALL = auto()


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of engine."""

    name: str
    knows: frozenset[str]
    """What the engine can do, in words of `needs.WORDS`."""
    fields: Mapping[str, str]
    """Our sampling parameters that OpenAI does not have: the engine's names for them."""
    penalty_span: str | None = None
    """The field for how many of the last tokens penalties count, -1 for all; None: they always count all."""
    takes_plain_regex: bool = False
    """As a field of its own; else it goes into `structured_outputs`."""
    completion_json: CompletionJson = CompletionJson.AS_CHAT

    @property
    def lacks(self) -> frozenset[str]:
        """The rest."""
        return frozenset(WORDS) - self.knows

    @property
    def tells_tokens(self) -> bool:
        """Answers have token ids where they are asked for."""
        return "generated" in self.knows


def _kind(name: str, fields: Mapping[str, str], *others: str) -> Kind:
    return Kind(name, _PLAIN | {f"sampling.{each}" for each in fields} | set(others), MappingProxyType(dict(fields)))


_OPENAI = replace(_kind("", {}), completion_json=CompletionJson.NOT_AT_ALL)
_LLAMA_CPP = _kind("llama.cpp", _SAME | {"repetition_penalty": "repeat_penalty"})
_KINDS: Mapping[str, Kind] = {
    "vllm": _kind(
        "vllm",
        _MORE,
        "cache_salt",
        "resume",
        "generated",
        "sampling.logprobs",
        "sampling.grammar.regex",
        "sampling.grammar.lark",
    ),
    "sglang": replace(_kind("sglang", _MORE, "sampling.grammar.regex"), takes_plain_regex=True),
    "llamacpp": replace(
        _LLAMA_CPP,
        knows=_LLAMA_CPP.knows - {"sampling.n"},
        penalty_span="repeat_last_n",
        completion_json=CompletionJson.BY_SCHEMA,
    ),
}


def kind_of(owner: str) -> Kind:
    """By what an engine writes into `owned_by` in its list of models. Unknown ones know OpenAI's words alone."""
    return _KINDS.get(owner.lower(), _OPENAI)


def sampling_fields(kind: Kind, sampling: SamplingParams, *, is_chat: bool) -> dict[str, Any]:
    """Of a request. Raises InvalidRequest for what this kind cannot do in this form."""
    own = {
        "max_tokens": sampling.max_new_tokens,
        "seed": None if sampling.seed is None else sampling.seed & _MAX_SEED,
        "stop": list(sampling.stop) or None,
        "n": sampling.n if sampling.n > 1 else None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "presence_penalty": sampling.presence_penalty or None,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias} or None,
    }
    # Always, as all in _FILTERS below: an engine has defaults of its own for these, or its model's authors have.
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    fields |= {name: value for name, value in own.items() if value is not None}
    for ours, theirs in kind.fields.items():
        value = getattr(sampling, ours)
        if ours in _FILTERS:
            fields[theirs] = value or _FILTERS[ours]
        elif value != _DEFAULTS[ours]:
            fields[theirs] = list(value) if isinstance(value, tuple) else value
    has_penalty = sampling.repetition_penalty not in (0, 1) or sampling.frequency_penalty or sampling.presence_penalty
    if has_penalty and kind.penalty_span is not None:
        fields[kind.penalty_span] = -1
    if kind.tells_tokens:
        fields["return_token_ids"] = True
    if sampling.logprobs is not None:
        if is_chat:
            raise InvalidRequest(
                "log probabilities of a chat need the model's tokenizer here: set --tokenizers",
                field="sampling.logprobs",
            )
        fields |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    return fields | _grammar_fields(kind, sampling, is_chat=is_chat)


_FILTERS: Mapping[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What shapes every token, and how an engine is told to leave it alone: llama.cpp's own are top_k 40 and min_p 0.05."""
_DEFAULTS: Mapping[str, Any] = {
    "ignore_eos": False,
    "min_new_tokens": 0,
    "stop_token_ids": (),
    "skip_special_tokens": True,
}


def _grammar_fields(kind: Kind, sampling: SamplingParams, *, is_chat: bool) -> dict[str, Any]:
    grammar = sampling.grammar
    if grammar is None:
        return {}
    if grammar.kind is GrammarKind.REGEX:
        regex = {"regex": grammar.source}
        return regex if kind.takes_plain_regex else {"structured_outputs": regex}
    if grammar.kind is GrammarKind.LARK:
        return {"structured_outputs": {"grammar": grammar.source}}
    schema: Any = {"type": "object"}
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = msgspec.Raw(grammar.source.encode())
    if not is_chat and kind.completion_json is CompletionJson.BY_SCHEMA:
        return {"json_schema": schema}
    if not is_chat and kind.completion_json is CompletionJson.NOT_AT_ALL:
        raise InvalidRequest("the engine that was chosen writes JSON in chats alone", field="sampling.grammar")
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def chat_fields(chat: inference_pb2.Chat) -> dict[str, Any]:
    """Messages, tools and variables of the template. What is JSON in them was validated before."""
    fields: dict[str, Any] = {"messages": [_message(message) for message in chat.messages]}
    if chat.tools_json:
        fields["tools"] = msgspec.Raw(chat.tools_json.encode())
    if chat.variables_json:
        fields["chat_template_kwargs"] = msgspec.Raw(chat.variables_json.encode())
    if chat.HasField("add_generation_prompt") and not chat.add_generation_prompt:
        fields["add_generation_prompt"] = False
    return fields


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    extra = msgspec.json.decode(message.extra_json, type=dict[str, Any]) if message.extra_json else {}
    calls = extra.get("tool_calls")
    if isinstance(calls, list):
        extra["tool_calls"] = [_closed(call) for call in calls]
    return {"role": message.role, "content": message.content} | extra


def _closed(call: Any) -> Any:
    """Chat templates see the arguments of a call as an object, OpenAI's HTTP as JSON in a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": msgspec.json.encode(function["arguments"]).decode()}}


def canonical_text(chat: inference_pb2.Chat) -> str:
    """A chat as one text that grows at its end as the chat does: what is hashed where no template is known."""
    parts: Sequence[str] = (
        chat.tools_json,
        chat.variables_json,
        *(f"\n{message.role}\n{message.content}{message.extra_json}" for message in chat.messages),
    )
    return "".join(parts)

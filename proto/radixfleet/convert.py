"""Between the wire (generated protobuf) and the values of `types`. What a client sends is validated here, once, but for
sampling parameters, which `radixfleet.sampling` reads.

Router and worker call the same functions, so every entry refuses the same things with the same words: InvalidRequest,
with the path of the field as the .proto names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from radixfleet.errors import InvalidRequest
from radixfleet.rates import PromptTokens, Recent, Totals
from radixfleet.types import (
    AcceptedLoad,
    Capacity,
    ChatMessage,
    ChatPrompt,
    FinishReason,
    Load,
    MemoryPools,
    ModelInfo,
    PromptForm,
    TokenArray,
    Usage,
    WorkerStatus,
)
from radixfleet.v1 import fleet_pb2, inference_pb2, worker_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ValueT = TypeVar("ValueT", bound="DataclassInstance")

JsonT = TypeVar("JsonT", dict[str, Any], list[Any])
_JSON_NAMES: Mapping[type, str] = {dict: "object", list: "array"}

_CHARACTER_BYTES = 4
"""Of UTF-8, at most."""
MAX_NAME_BYTES = 1024
"""Of request_id, model, cache_salt and lease_id."""


def check_names(request: inference_pb2.GenerateRequest) -> None:
    """Refuse names too long for logs, metrics and headers."""
    texts = request.request_id, request.model, request.cache_salt, request.lease_id
    if max(map(len, texts)) * _CHARACTER_BYTES <= MAX_NAME_BYTES:
        return
    for name, text in zip(("request_id", "model", "cache_salt", "lease_id"), texts, strict=True):
        size = len(text.encode())
        if size > MAX_NAME_BYTES:
            raise InvalidRequest(f"{name} has {size} bytes; at most {MAX_NAME_BYTES} are allowed", field=name)


def pack_tokens(tokens: TokenArray) -> inference_pb2.TokenIds:
    """Token ids in the packed form."""
    return inference_pb2.TokenIds(packed=tokens.astype("<u4", copy=False).tobytes())


def unpack_tokens(message: inference_pb2.TokenIds, field: str = "token_ids") -> TokenArray:
    """Token ids from either form, read-only. Refuses both forms at once, and a packed length not a multiple of 4."""
    packed = message.packed  # a copy, each time that it is read
    if not packed:
        return np.array(message.ids, dtype=np.uint32)
    if message.ids:
        raise InvalidRequest(f"{field} has both ids and packed; set one", field=field)
    if len(packed) % 4:
        path = f"{field}.packed"
        raise InvalidRequest(f"{path} has {len(packed)} bytes, not a multiple of 4", field=path)
    return np.frombuffer(packed, dtype="<u4")


def prompt_form(message: inference_pb2.Prompt) -> PromptForm:
    """Which of the three forms a prompt has: text, token ids (at least one), or a chat (at least one message)."""
    form = message.WhichOneof("form")
    if form == "text":
        return message.text
    if form == "token_ids":
        tokens = unpack_tokens(message.token_ids, "prompt.token_ids")
        if not len(tokens):
            raise InvalidRequest("prompt.token_ids is empty", field="prompt.token_ids")
        return tokens
    if form == "chat":
        return _chat(message.chat, "prompt.chat")
    raise InvalidRequest("prompt is not set: give text, token_ids or chat", field="prompt")


def _chat(message: inference_pb2.Chat, field: str) -> ChatPrompt:
    path = f"{field}.messages"
    if not message.messages:
        raise InvalidRequest(f"{path} is empty", field=path)
    return ChatPrompt(
        messages=tuple(_chat_message(item, f"{path}[{index}]") for index, item in enumerate(message.messages)),
        add_generation_prompt=message.add_generation_prompt if message.HasField("add_generation_prompt") else True,
        tools=tuple(_json(message.tools_json, list, f"{field}.tools_json")),
        variables=_json(message.variables_json, dict, f"{field}.variables_json"),
    )


def _chat_message(message: inference_pb2.ChatMessage, field: str) -> ChatMessage:
    if not message.role:
        path = f"{field}.role"
        raise InvalidRequest(f"{path} is empty", field=path)
    return ChatMessage(message.role, message.content, _json(message.extra_json, dict, f"{field}.extra_json"))


def _json(text: str, kind: type[JsonT], field: str) -> JsonT:
    """What `text` says; empty where it is."""
    if not text:
        return kind()
    try:
        value: JsonT = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field} must be a JSON {_JSON_NAMES[kind]}: {error}", field=field) from error
    return value


def check_tokens(tokens: TokenArray, *, vocab_size: int, field: str = "prompt") -> None:
    """Refuse a prompt without tokens, and ids that the model does not have."""
    if not len(tokens):
        raise InvalidRequest(f"{field} has no tokens", field=field)
    highest = tokens.item(tokens.argmax())  # `max` takes twice as long
    if highest >= vocab_size:
        raise InvalidRequest(f"{field} holds token id {highest}, but the model's end at {vocab_size - 1}", field=field)


def model_info_to_pb(info: ModelInfo) -> inference_pb2.ModelInfo:
    """To the wire."""
    return inference_pb2.ModelInfo(**_fields(info))


def model_info(message: inference_pb2.ModelInfo) -> ModelInfo:
    """From the wire."""
    return _value(ModelInfo, message)


def capacity_to_pb(capacity: Capacity) -> worker_pb2.Capacity:
    """To the wire."""
    return worker_pb2.Capacity(**_fields(capacity))


def capacity(message: worker_pb2.Capacity) -> Capacity:
    """From the wire."""
    return _value(Capacity, message)


def memory_pools_to_pb(pools: MemoryPools) -> worker_pb2.MemoryPools:
    """To the wire."""
    return worker_pb2.MemoryPools(**_fields(pools))


def memory_pools(message: worker_pb2.MemoryPools) -> MemoryPools:
    """From the wire."""
    return _value(MemoryPools, message)


def load_to_pb(load: Load) -> worker_pb2.Load:
    """To the wire."""
    return worker_pb2.Load(**_fields(load))


def load(message: worker_pb2.Load) -> Load:
    """From the wire."""
    return _value(Load, message)


def accepted_load_to_pb(load: AcceptedLoad) -> worker_pb2.AcceptedLoad:
    """To the wire."""
    return worker_pb2.AcceptedLoad(**_fields(load))


def accepted_load(message: worker_pb2.AcceptedLoad) -> AcceptedLoad:
    """From the wire."""
    return _value(AcceptedLoad, message)


def totals_to_pb(totals: Totals) -> worker_pb2.Totals:
    """To the wire."""
    return worker_pb2.Totals(**_fields(totals))


def totals(message: worker_pb2.Totals) -> Totals:
    """From the wire."""
    return _value(Totals, message)


def recent_to_pb(recent: Recent) -> fleet_pb2.Recent:
    """To the wire."""
    return fleet_pb2.Recent(
        seconds=recent.seconds,
        totals=totals_to_pb(recent.totals),
        prompt_tokens=fleet_pb2.PromptTokens(**_fields(recent.prompt_tokens)),
    )


def recent(message: fleet_pb2.Recent) -> Recent:
    """From the wire."""
    return Recent(message.seconds, totals(message.totals), _value(PromptTokens, message.prompt_tokens))


def usage_to_pb(usage: Usage) -> inference_pb2.Usage:
    """To the wire."""
    return inference_pb2.Usage(**_fields(usage))


def usage(message: inference_pb2.Usage) -> Usage:
    """From the wire."""
    return _value(Usage, message)


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a value whose message has the same names."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _value(kind: type[ValueT], message: Message) -> ValueT:
    """By what is known of the classes already: twenty times a second each worker reports."""
    fields = {name: getattr(message, name) for name in kind.__dataclass_fields__}
    for name in _repeated(message.DESCRIPTOR):
        if name in fields:
            fields[name] = tuple(fields[name])
    return kind(**fields)


@cache
def _repeated(kind: Descriptor) -> tuple[str, ...]:
    """The fields of a message that hold many values."""
    return tuple(field.name for field in kind.fields if field.is_repeated)


_FINISH_TO_PB: Mapping[FinishReason, inference_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
_FINISH_FROM_PB = {value: reason for reason, value in _FINISH_TO_PB.items()}

_STATUS_TO_PB: Mapping[WorkerStatus, worker_pb2.WorkerStatus.ValueType] = {
    WorkerStatus.LOADING: worker_pb2.WORKER_STATUS_LOADING,
    WorkerStatus.SERVING: worker_pb2.WORKER_STATUS_SERVING,
    WorkerStatus.DRAINING: worker_pb2.WORKER_STATUS_DRAINING,
    WorkerStatus.FAILED: worker_pb2.WORKER_STATUS_FAILED,
}
_STATUS_FROM_PB = {value: status for status, value in _STATUS_TO_PB.items()}


def finish_reason_to_pb(reason: FinishReason) -> inference_pb2.FinishReason.ValueType:
    """To the wire."""
    return _FINISH_TO_PB[reason]


def finish_reason(value: inference_pb2.FinishReason.ValueType) -> FinishReason:
    """From the wire. A reason that this version does not know promises nothing about the text: ABORT."""
    return _FINISH_FROM_PB.get(value, FinishReason.ABORT)


def worker_status_to_pb(status: WorkerStatus) -> worker_pb2.WorkerStatus.ValueType:
    """To the wire."""
    return _STATUS_TO_PB[status]


def worker_status(value: worker_pb2.WorkerStatus.ValueType) -> WorkerStatus:
    """From the wire. A status that this version does not know gets no traffic: FAILED."""
    return _STATUS_FROM_PB.get(value, WorkerStatus.FAILED)

"""Values that router and worker share. Frozen, without protobuf: `convert` translates to and from the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = npt.NDArray[np.uint32]
"""Token ids, one dimension, C order. `tobytes()` is the packed form of the wire, and what blocks are hashed over."""

BlockHash = NewType("BlockHash", int)
"""Unsigned 64-bit chained hash of a routing block: names the whole prefix that ends with the block."""

HashArray: TypeAlias = npt.NDArray[np.uint64]
"""Block hashes, one dimension: those of a prompt's whole blocks in their order, or a set of them."""

Incarnation = NewType("Incarnation", int)
"""Unsigned 64-bit random number of one start of a worker's engine. What was cached before it is gone."""

WorkerId = NewType("WorkerId", str)

ExecutionId = NewType("ExecutionId", str)
"""One run of one request on one worker; never used again."""


class FinishReason(StrEnum):
    """Why a generation ended. A failure is not a reason: it ends the call with an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class WorkerStatus(StrEnum):
    """State of a worker as it reports it."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


MAX_LOGPROBS = 20
"""Most alternatives, likeliest first, whose log probabilities can be asked for at each place of a text."""


class GrammarKind(StrEnum):
    """How a grammar is written; the values are the fields of the wire's `Grammar`."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that a whole answer must have."""

    kind: GrammarKind
    source: str
    """Empty with JSON_OBJECT."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a generation ends, validated and with every default filled in.

    Made by `radixfleet.sampling.sampling_params` and nowhere else, so that every entry refuses the same things.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int | None = None
    """None: the worker's default, or what the context leaves when that is less."""
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), by ascending id."""
    logprobs: int | None = None
    """Return the log probability of each new token, and of so many of the likeliest in its place. None: none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    n: int = 1
    """Completions of the same prompt."""
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken, whatever the seed."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the chat template sees in the message (tool_calls, tool_call_id); plain values of JSON."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt that the model's chat template lays out."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    """End the prompt with the header of the assistant's turn."""
    tools: tuple[Any, ...] = ()
    """Tools that the model may call, as the chat template expects them; plain values of JSON."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What else the chat template asks for (enable_thinking); plain values of JSON."""


PromptForm: TypeAlias = str | TokenArray | ChatPrompt
"""The three forms of a prompt: text, token ids, a chat."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One served model, as `Inference.GetModelInfo` tells it."""

    model: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    tokenizer_fingerprint: int
    dtype: str
    num_parameters: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker can hold."""

    kv_tokens: int
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int


@dataclass(frozen=True, slots=True)
class MemoryPools:
    """The three pools of a worker's device memory, in bytes."""

    device: str
    total_bytes: int
    weights_bytes: int
    kv_bytes: int
    activations_bytes: int
    bounded_by: str


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker is doing. Only what cannot be evicted counts as load (a full cache is not a busy worker)."""

    running_requests: int = 0
    waiting_requests: int = 0
    outstanding_prompt_tokens: int = 0
    """Prompt tokens of waiting and prefilling requests, neither cached nor computed yet."""
    kv_protected_tokens: int = 0
    kv_evictable_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AcceptedLoad:
    """What a worker has accepted and not finished, as its front knows it: ahead of the engine's reports."""

    requests: int
    """Requests accepted and not ended."""
    prompt_tokens: int
    """Prompt tokens still to be computed for requests without a first token: without those that were cached, or that
    another accepted request was to compute, when they were accepted."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a finished request used. Times in seconds, measured on the worker."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens_unknown: bool = False
    """The engine does not tell; `cached_tokens` is 0."""

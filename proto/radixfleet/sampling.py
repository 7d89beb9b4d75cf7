"""Sampling parameters between the wire and `types.SamplingParams`. The one validation of them, for every entry.

What is refused is refused with InvalidRequest and the path of the field, as the .proto names it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from radixfleet.errors import InvalidRequest
from radixfleet.types import MAX_LOGPROBS, Grammar, GrammarKind, SamplingParams
from radixfleet.v1 import inference_pb2

_FLOATS = {
    "temperature": (1.0, 0.0, 100.0),
    "top_p": (1.0, 0.0, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "presence_penalty": (0.0, -2.0, 2.0),
    "repetition_penalty": (1.0, 0.01, 100.0),
}
"""Default, least and greatest value."""
MAX_BIAS = 100.0
MAX_BIASED_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_COMPLETIONS = 64
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_TOKENS = 2**31 - 1
"""No context is longer; beyond it, arithmetic with lengths would overflow."""


def sampling_params(
    message: inference_pb2.SamplingParams, *, vocab_size: int | None = None, field: str = "sampling"
) -> SamplingParams:
    """Validated parameters with every default filled in. Without `vocab_size`, token ids are not held against it."""
    sampling = SamplingParams(
        top_k=max(message.top_k, 0),
        seed=message.seed if message.HasField("seed") else None,
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else None,
        min_new_tokens=message.min_new_tokens,
        stop=_stop_strings(message.stop, f"{field}.stop"),
        stop_token_ids=tuple(dict.fromkeys(message.stop_token_ids)),
        ignore_eos=message.ignore_eos,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        logit_bias=_logit_bias(message.logit_bias, vocab_size, f"{field}.logit_bias"),
        logprobs=_num_logprobs(message, field, "logprobs"),
        prompt_logprobs=_num_logprobs(message, field, "prompt_logprobs"),
        n=_completions(message, f"{field}.n"),
        grammar=_grammar(message.grammar, f"{field}.grammar") if message.HasField("grammar") else None,
        **{name: _bounded(message, field, name, *bounds) for name, bounds in _FLOATS.items()},
    )
    if sampling.top_p == 0.0:
        raise InvalidRequest(f"{field}.top_p must be greater than 0 and at most 1", field=f"{field}.top_p")
    if message.top_k < -1:
        raise InvalidRequest(f"{field}.top_k must be at least 1, or 0 or -1 to keep all", field=f"{field}.top_k")
    _check_lengths(sampling, field)
    _check_ids(sampling.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size, f"{field}.stop_token_ids")
    return sampling


def check_continuable(sampling: SamplingParams, field: str) -> None:
    """Refuse to go on with an answer from its tokens alone, where more than they would have to be known.

    `field`: what asks for it.
    """
    reasons = {
        "n": sampling.n > 1,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "grammar": sampling.grammar is not None,
    }
    for name, is_set in reasons.items():
        if is_set:
            raise InvalidRequest(f"{field} does not go together with sampling.{name}", field=field)


def _bounded(
    message: inference_pb2.SamplingParams, field: str, name: str, default: float, low: float, high: float
) -> float:
    if not message.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
        return default
    value: float = getattr(message, name)
    if not math.isfinite(value) or not low <= value <= high:
        path = f"{field}.{name}"
        raise InvalidRequest(f"{path} must be a number from {low:g} to {high:g}, got {value!r}", field=path)
    return value + 0.0  # -0.0 becomes 0.0


def _stop_strings(stop: Iterable[str], field: str) -> tuple[str, ...]:
    strings = tuple(dict.fromkeys(stop))
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{field} has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", field=field)
    for index, text in enumerate(strings):
        if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
            path = f"{field}[{index}]"
            raise InvalidRequest(f"{path} must have 1 to {MAX_STOP_BYTES} bytes, has {len(text.encode())}", field=path)
    return strings


def _check_lengths(sampling: SamplingParams, field: str) -> None:
    path = f"{field}.max_new_tokens"
    if sampling.max_new_tokens is not None and not 1 <= sampling.max_new_tokens <= MAX_TOKENS:
        raise InvalidRequest(f"{path} must be from 1 to {MAX_TOKENS}, got {sampling.max_new_tokens}", field=path)
    path = f"{field}.min_new_tokens"
    limit = MAX_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
    if sampling.min_new_tokens > limit:
        raise InvalidRequest(
            f"{path} is {sampling.min_new_tokens}, more than max_new_tokens allows ({limit})", field=path
        )


def _check_ids(ids: Collection[int], most: int, vocab_size: int | None, field: str) -> None:
    if len(ids) > most:
        raise InvalidRequest(f"{field} has {len(ids)} ids; at most {most} are allowed", field=field)
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise InvalidRequest(f"{field} holds {max(ids)}, but the model's ids end at {vocab_size - 1}", field=field)


def _logit_bias(bias: Mapping[int, float], vocab_size: int | None, field: str) -> tuple[tuple[int, float], ...]:
    _check_ids(bias, MAX_BIASED_IDS, vocab_size, field)
    for token_id, value in bias.items():
        if not math.isfinite(value) or abs(value) > MAX_BIAS:
            path = f"{field}[{token_id}]"
            raise InvalidRequest(
                f"{path} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, got {value!r}", field=path
            )
    return tuple(sorted(bias.items()))


def _num_logprobs(message: inference_pb2.SamplingParams, field: str, name: str) -> int | None:
    if not message.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
        return None
    value: int = getattr(message, name)
    if value > MAX_LOGPROBS:
        path = f"{field}.{name}"
        raise InvalidRequest(f"{path} must be from 0 to {MAX_LOGPROBS}, got {value}", field=path)
    return value


def _completions(message: inference_pb2.SamplingParams, field: str) -> int:
    if not message.HasField("n"):
        return 1
    if not 1 <= message.n <= MAX_COMPLETIONS:
        raise InvalidRequest(f"{field} must be from 1 to {MAX_COMPLETIONS}, got {message.n}", field=field)
    return message.n


def _grammar(message: inference_pb2.Grammar, field: str) -> Grammar:
    """Of bounded size and not empty; whether it can be compiled is for the worker to say."""
    form = message.WhichOneof("form")
    if form is None:
        raise InvalidRequest(f"{field} is not set: give json_schema, json_object, regex or lark", field=field)
    path = f"{field}.{form}"
    if form == "json_object":
        if not message.json_object:
            raise InvalidRequest(f"{path} must be true; leave grammar unset for any answer", field=path)
        return Grammar(GrammarKind.JSON_OBJECT, "")
    source: str = getattr(message, form)
    if not source:
        raise InvalidRequest(f"{path} is empty", field=path)
    size = len(source.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{path} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", field=path)
    return Grammar(GrammarKind(form), source)

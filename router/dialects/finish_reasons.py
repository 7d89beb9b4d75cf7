"""Why an answer ended, in the words of other engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import structlog

from radixfleet.errors import InternalError
from radixfleet.types import FinishReason

_WORDS: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "content_filter": FinishReason.ABORT,
}
_FAILED = re.compile("error|fail")
_MOST_SAID = 100

_log = structlog.get_logger("radixfleet.router.dialects")


def finish_reason(told: str) -> FinishReason:
    """Engines add details to their words ("abort: ..."), and have words of their own.

    An answer that ended for a reason that nobody here knows is an answer: it has stopped, as it does in other gateways.
    Raises InternalError where the word says that the answer failed ("error", "network_error").
    """
    word = re.split(r"[^a-z_]", told.lower(), maxsplit=1)[0]
    reason = _WORDS.get(word)
    if reason is not None:
        return reason
    if _FAILED.search(told.lower()):
        raise InternalError(f"the engine gave the answer up: {told[:_MOST_SAID]}")
    _warn(told[:_MOST_SAID])
    return FinishReason.STOP


@lru_cache(maxsize=256)
def _warn(told: str) -> None:
    """Warn once of each unknown word."""
    _log.warning("an engine ended an answer for an unknown reason, which is taken for stop", finish_reason=told)

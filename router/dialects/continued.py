"""Going on with an answer of which the client has the beginning."""

from __future__ import annotations

from dataclasses import replace

from radixfleet.types import SamplingParams


def rest_of(sampling: SamplingParams, max_new_tokens: int, generated_tokens: int) -> SamplingParams:
    """`sampling` for what is left of an answer of `max_new_tokens`, at least one."""
    left = max(1, max_new_tokens - generated_tokens)
    least = min(left, max(0, sampling.min_new_tokens - generated_tokens))
    return replace(sampling, max_new_tokens=left, min_new_tokens=least)

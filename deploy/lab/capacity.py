"""How many requests a second a fleet can take, by arithmetic: to choose a rate that loads it as wanted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deploy.lab.presets import Preset
from loadtest.results import FloatArray
from loadtest.workloads import Arrival, reusable_tokens

TYPICAL_BATCH = 32
"""Requests that share the reading of the weights, where the KV pool has room for them."""


def requests_per_s(presets: Sequence[Preset], arrivals: Sequence[Arrival]) -> float:
    """What the workers could do together if every prompt found in a cache all that can be found there."""
    prompt = np.array([arrival.prompt_tokens for arrival in arrivals], dtype=np.float64)
    output = np.array([arrival.max_new_tokens for arrival in arrivals], dtype=np.float64)
    computed = prompt - np.array(reusable_tokens(arrivals), dtype=np.float64)
    return sum(1 / _request_s(preset, prompt, computed, output) for preset in presets)


def _request_s(preset: Preset, prompt: FloatArray, computed: FloatArray, output: FloatArray) -> float:
    """Mean time that one request takes of a worker. Tokens of each: its prompt, what is computed of it, its answer."""
    cost = preset.cost
    room = preset.kv_tokens / float((prompt + output).mean())
    batch = min(TYPICAL_BATCH, preset.ready.capacity.max_running_requests, max(1.0, room))
    prefill_s = computed * (cost.prefill_token_s + cost.prefill_context_token_s * (prompt - computed / 2))
    decode_s = output * (cost.step_s / batch + cost.decode_token_s + cost.context_token_s * (prompt + output / 2))
    return float((prefill_s + decode_s).mean())

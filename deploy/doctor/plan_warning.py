"""A plan that runs, and yet refuses requests which the model's own limit allows: what to say, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deploy.doctor.planning import Wanted, alternatives, fits
from worker.memory.plan import MemoryPlanError


def context_warning(wanted: Wanted) -> list[str]:
    """What is short, and below it each thing that would mend it; empty where the pool holds the longest request.

    Empty also where nothing useful fits at all, and where a context length was asked for: both are told as errors.
    """
    plan = fits(wanted)
    if plan is None or plan.kv_tokens >= wanted.context:
        return []
    return [
        f"the KV pool holds {plan.kv_tokens:,} tokens, less than one request of the model's own limit of "
        f"{wanted.context:,}: longer requests are refused. What helps:",
        f"--context-length {plan.kv_tokens} or less, if no request is longer: it says what is served",
        *_settings(replace(wanted, context_length=wanted.context)),
        *alternatives(replace(wanted, context_length=wanted.context)),
    ]


def _settings(whole: Wanted) -> Iterator[str]:
    """What the worker's own plan would advise about this model on this device, when the whole context is demanded."""
    try:
        whole.plan()
    except MemoryPlanError as error:
        if error.advice.setting != "device_memory":  # more memory is what the alternatives name, device by device
            yield error.advice.text

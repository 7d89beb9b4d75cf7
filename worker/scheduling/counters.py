"""Totals since the scheduler's start."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct):
    """Written by the scheduler alone; every number only grows."""

    admitted_requests: int = 0
    """First admissions; coming back after a retraction does not count again."""
    finished_requests: int = 0
    """Requests that are complete: by a stop, or by their length."""
    aborted_requests: int = 0
    failed_requests: int = 0
    refused_requests: int = 0
    """Requests that could never fit."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    cached_tokens: int = 0
    """The part of `prompt_tokens` that was found in the cache at first admission."""
    computed_tokens: int = 0
    """Tokens computed by all launched steps: prompts, decodes, and once more what a retraction lost."""
    prompt_step_tokens: int = 0
    """The part of `computed_tokens` in chunks of prompts; the others are decodes."""
    prefill_steps: int = 0
    """Launched steps that only computed prompts."""
    decode_steps: int = 0
    """Launched steps that only decoded."""
    mixed_steps: int = 0
    """Launched steps that did both."""
    generated_tokens: int = 0
    discarded_tokens: int = 0
    """Sampled by a step that was in flight when its request ended."""
    retractions: int = 0
    preemptions: int = 0
    """The part of `retractions` that made room for a waiting request of higher priority."""
    out_of_memory_prefill: int = 0
    """Steps with chunks of prompts that were taken back because the device had no memory for them."""
    out_of_memory_decode: int = 0
    """Steps of decodes alone that were taken back for the same reason."""
    out_of_memory_sampling: int = 0
    """Steps that were taken back when memory ran out in sampling, after all layers were computed."""
    stalled_decodes: int = 0
    """Decodes that skipped a step, for want of a page about to be released."""

    def launched(self, decodes: int, prompt_tokens: int, *, steps: int = 1) -> None:
        """Count `steps` like steps, each of so many decodes and tokens of prompts."""
        self.computed_tokens += steps * (decodes + prompt_tokens)
        self.prompt_step_tokens += steps * prompt_tokens
        if decodes and prompt_tokens:
            self.mixed_steps += steps
        elif prompt_tokens:
            self.prefill_steps += steps
        else:
            self.decode_steps += steps

    def as_dict(self) -> dict[str, float]:
        """A copy, by name."""
        return msgspec.structs.asdict(self)

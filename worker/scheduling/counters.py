"""Totals since the scheduler's start."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Written by the scheduler alone; every number only grows."""

    admitted_requests: int = 0
    """First admissions; coming back after a retraction does not count again."""
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    refused_requests: int = 0
    """Those that could never fit."""
    prompt_tokens: int = 0
    """Of admitted requests."""
    cached_tokens: int = 0
    """Of those, found in the cache at first admission."""
    computed_tokens: int = 0
    """Computed by all launched steps: prompts, decodes, and once more what a retraction lost."""
    generated_tokens: int = 0
    discarded_tokens: int = 0
    """Sampled by a step that was in flight when its request ended."""
    retractions: int = 0
    preemptions: int = 0
    """Of those, retractions for a waiting request of higher priority."""
    out_of_memory_prefill: int = 0
    """Steps that were taken back because the device had no memory for them: those with chunks of prompts, ..."""
    out_of_memory_decode: int = 0
    """... those without, ..."""
    out_of_memory_sampling: int = 0
    """... and those that failed when all layers were computed."""
    stalled_decodes: int = 0
    """Decodes that skipped a step, for want of a page about to be released."""

    def as_dict(self) -> dict[str, float]:
        """A copy, by name."""
        return asdict(self)

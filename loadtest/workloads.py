"""Workloads: what requests arrive, when, and what they share. Plain data made from a seed; others send them.

A workload is a list of `Arrival`s in order of time. Prompts are token ids, so that a workload means the same for every
tokenizer of at least `vocab_size` tokens, and so that what two prompts share is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixfleet.types import TokenArray


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    at_s: float
    """Seconds since the workload's start. All zero: everything is there at once; the sender's concurrency paces it."""
    group: int
    """Requests of one group share a prefix."""
    token_ids: TokenArray
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of prompts with a prefix each: the system prompts of several applications, say.

    With `zipf` 0 every group has the same number of prompts; otherwise group k (from 1) has a weight of k ** -zipf.
    """

    num_groups: int
    prompts_per_group: int
    """On average, when `zipf` is not 0."""
    prefix_tokens: int
    unique_tokens: int
    max_new_tokens: int
    zipf: float = 0.0
    requests_per_s: float | None = None
    """Mean rate of a Poisson process; None: everything is there at once."""

    def ceiling(self, arrivals: Sequence[Arrival]) -> float:
        """The highest hit rate that any router and any cache could reach: each group's prefix is computed once.

        A share of prompt tokens, between 0 and 1, like the hit rate itself.
        """
        prompt_tokens = sum(len(arrival.token_ids) for arrival in arrivals)
        first_computed = len({arrival.group for arrival in arrivals})
        reusable = (len(arrivals) - first_computed) * self.prefix_tokens
        return reusable / prompt_tokens if prompt_tokens else 0.0

    def arrivals(self, *, vocab_size: int, seed: int) -> list[Arrival]:
        """The workload, shuffled, the same for the same seed. Token ids are drawn from [0, vocab_size)."""
        random = np.random.default_rng(seed)
        groups = self._groups(random)
        prefixes = random.integers(0, vocab_size, (self.num_groups, self.prefix_tokens), dtype=np.uint32)
        tails = random.integers(0, vocab_size, (len(groups), self.unique_tokens), dtype=np.uint32)
        return [
            Arrival(float(at_s), int(group), np.concatenate([prefixes[group], tail]), self.max_new_tokens)
            for at_s, group, tail in zip(self._times(len(groups), random), groups, tails, strict=True)
        ]

    def _groups(self, random: np.random.Generator) -> np.ndarray:
        total = self.num_groups * self.prompts_per_group
        if self.zipf:
            weights = np.arange(1, self.num_groups + 1, dtype=float) ** -self.zipf
            return random.choice(self.num_groups, size=total, p=weights / weights.sum())
        groups = np.repeat(np.arange(self.num_groups), self.prompts_per_group)
        random.shuffle(groups)
        return groups

    def _times(self, count: int, random: np.random.Generator) -> np.ndarray:
        if self.requests_per_s is None:
            return np.zeros(count)
        return np.cumsum(random.exponential(1 / self.requests_per_s, size=count))

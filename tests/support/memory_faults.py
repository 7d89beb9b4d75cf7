"""Rules by which a simulated device runs out of memory: for `SimRunner.faults.out_of_memory`."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from worker.core.out_of_memory import OutOfMemory
from worker.core.step import StepPlan

MIB = 1 << 20
Rule = Callable[[StepPlan], OutOfMemory | None]


def shortage(*, in_sampling: bool = False) -> OutOfMemory:
    return OutOfMemory(needed_bytes=300 * MIB, free_bytes=100 * MIB, in_sampling=in_sampling)


def over(*, tokens: int | None = None, sequences: int | None = None, in_sampling: bool = False) -> Rule:
    """Steps that are larger than this."""

    def rule(plan: StepPlan) -> OutOfMemory | None:
        too_large = (tokens is not None and plan.num_tokens > tokens) or (
            sequences is not None and plan.num_sequences > sequences
        )
        return shortage(in_sampling=in_sampling) if too_large else None

    return rule


def at_steps(steps: Collection[int]) -> Rule:
    """Steps of these numbers."""
    return lambda plan: shortage() if plan.step in steps else None


def while_tokens_in(token_id: int, at_least: int) -> Rule:
    """Steps that compute `token_id` of a prompt beside `at_least - 1` other tokens or more: one request is to blame."""

    def rule(plan: StepPlan) -> OutOfMemory | None:
        known = np.repeat(~plan.relayed, plan.lengths)
        blamed = bool((plan.input_ids[known] == token_id).any())
        return shortage() if blamed and plan.num_tokens >= at_least else None

    return rule


class Unsteady:
    """What is free comes and goes, as when other processes share the device: steps of every size fail."""

    def __init__(self, seed: int, most: int) -> None:
        self._random = np.random.default_rng(seed)
        self.left = most
        self._tokens = self._sequences = 64

    def __call__(self, plan: StepPlan) -> OutOfMemory | None:
        if self._random.random() < 0.25:
            self._tokens, self._sequences = (int(size) for size in 2 ** self._random.integers(0, 7, 2))
        in_sampling = plan.num_sequences > self._sequences
        unlucky = self._random.random() < 0.25
        if not self.left or not (in_sampling or unlucky or plan.num_tokens > self._tokens):
            return None
        self.left -= 1
        return shortage(in_sampling=in_sampling)

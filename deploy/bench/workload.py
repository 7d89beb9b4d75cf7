"""What the benchmarked engines are asked: prompts with shared prefixes, all there at once. Plain data from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.core.messages import Submit
from worker.engine.handle import EngineHandle

_LOWEST_ID, _HIGHEST_ID = 100, 30_000
"""Ordinary tokens of every vocabulary in use."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload."""

    token_ids: npt.NDArray[np.int32]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that come all at once; the prefixes go round. Each ends by length."""

    num_requests: int
    num_prefixes: int
    prefix_tokens: int
    unique_tokens: int
    new_tokens: tuple[int, int]
    """Fewest and most new tokens of a request; uniform in between."""

    @property
    def context_tokens(self) -> int:
        """The most tokens that a request comes to have."""
        return self.prefix_tokens + self.unique_tokens + self.new_tokens[1]

    def prompts(self, seed: int) -> list[Prompt]:
        """The requests: the same for the same seed."""
        random = np.random.default_rng(seed)
        prefixes = random.integers(_LOWEST_ID, _HIGHEST_ID, (self.num_prefixes, self.prefix_tokens), dtype=np.int32)
        tails = random.integers(_LOWEST_ID, _HIGHEST_ID, (self.num_requests, self.unique_tokens), dtype=np.int32)
        lengths = random.integers(*self.new_tokens, self.num_requests, endpoint=True)
        return [
            Prompt(np.concatenate([prefixes[index % self.num_prefixes], tail]), int(length))
            for index, (tail, length) in enumerate(zip(tails, lengths, strict=True))
        ]


def submit_of(engine: EngineHandle, prompt: Prompt) -> Submit:
    """A greedy request for `engine`, which nothing ends but its length."""
    return Submit(
        uid=engine.next_uid(),
        token_ids=prompt.token_ids,
        namespace=("bench",),
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        max_new_tokens=prompt.max_new_tokens,
        min_new_tokens=0,
        stop_token_ids=(),
        priority=0,
    )

"""Workloads: what requests arrive, when, and what they share. Plain data made from a seed; others send them.

A workload makes a list of `Arrival`s in order of time. Prompts are token ids, so that a workload means the same for
every tokenizer of at least `vocab_size` tokens, and so that what two prompts share is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loadtest.tokens import Run, TokenSource
from radixfleet.types import TokenArray

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    at_s: float
    """Seconds since the workload's start. All zero: everything is there at once."""
    runs: tuple[Run, ...]
    """The prompt."""
    max_new_tokens: int
    answer: int
    """Name of the run that a simulation takes for the answer; the next turn of a chat has it in its prompt."""
    source: TokenSource

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(run.length for run in self.runs)

    @property
    def token_ids(self) -> TokenArray:
        """The prompt, made anew on each access."""
        return self.source.tokens(self.runs)

    @property
    def answer_ids(self) -> TokenArray:
        """The answer, made anew on each access."""
        return self.source.tokens((Run(self.answer, self.max_new_tokens),))


class Workload(Protocol):
    """A way to make arrivals."""

    def arrivals(self, *, vocab_size: int, seed: int) -> list[Arrival]:
        """The requests in order of time, the same for the same seed. Token ids are drawn from [0, vocab_size)."""
        ...


def reusable_tokens(arrivals: Sequence[Arrival]) -> list[int]:
    """For each arrival: prompt tokens that an earlier one had too, in its prompt or its answer, as a prefix.

    The last token of a prompt is always computed, and so never counts; that of an answer is never computed.
    """
    # A node of the tree of runs -> its continuations: the longest length seen of each, and the whole runs behind it.
    longest: dict[tuple[int, int], int] = {}
    children: dict[tuple[int, Run], int] = {}
    reusable = []
    for arrival in arrivals:
        node, shared, is_shared = 0, 0, True
        for run in (*arrival.runs, Run(arrival.answer, arrival.max_new_tokens - 1)):
            seen = longest.get((node, run.name), 0)
            if is_shared:
                shared += min(seen, run.length)
            is_shared = is_shared and (node, run) in children
            longest[node, run.name] = max(seen, run.length)
            node = children.setdefault((node, run), len(children) + 1)
        reusable.append(min(shared, arrival.prompt_tokens - 1))
    return reusable


def scaled(arrivals: Sequence[Arrival], lengths: float) -> list[Arrival]:
    """The same requests with all prompts and answers `lengths` times as long, at least a token each.

    What two prompts share stays shared: a shorter run is the beginning of the longer one.
    """
    return [
        replace(
            arrival,
            runs=tuple(Run(run.name, max(1, round(run.length * lengths))) for run in arrival.runs if run.length),
            max_new_tokens=max(1, round(arrival.max_new_tokens * lengths)),
        )
        for arrival in arrivals
    ]


def ceiling(arrivals: Sequence[Arrival]) -> float:
    """The highest hit rate that any router and any cache could reach: one that keeps everything, for all workers.

    A share of the prompt tokens, like the hit rate itself.
    """
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    return sum(reusable_tokens(arrivals)) / prompt_tokens if prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of prompts with a prefix each: the system prompts of several applications, say.

    With `zipf` 0 every group has the same number of prompts; otherwise group k (from 1) has a weight of k ** -zipf.
    With `prefix_tokens` 0 nothing is shared.
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

    def arrivals(self, *, vocab_size: int, seed: int) -> list[Arrival]:
        """The workload, shuffled over the groups."""
        random = np.random.default_rng(seed)
        source = TokenSource(vocab_size, seed)
        groups = self._groups(random)
        # Names: a prefix a group, then a tail and an answer a request.
        tails = range(self.num_groups, self.num_groups + 2 * len(groups), 2)
        times = arrival_times(len(groups), self.requests_per_s, random)
        return [
            Arrival(
                float(at_s),
                (Run(int(group), self.prefix_tokens), Run(tail, self.unique_tokens)),
                self.max_new_tokens,
                tail + 1,
                source,
            )
            for at_s, group, tail in zip(times, groups, tails, strict=True)
        ]

    def _groups(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        total = self.num_groups * self.prompts_per_group
        if self.zipf:
            weights = np.arange(1, self.num_groups + 1, dtype=float) ** -self.zipf
            return random.choice(self.num_groups, size=total, p=weights / weights.sum())
        groups = np.repeat(np.arange(self.num_groups), self.prompts_per_group)
        random.shuffle(groups)
        return groups


@dataclass(frozen=True, slots=True)
class SiblingBursts:
    """Bursts of prompts that come at one moment with a new prefix: an agent's parallel questions on a document."""

    num_bursts: int
    siblings: int
    prefix_tokens: int
    unique_tokens: int
    max_new_tokens: int
    bursts_per_s: float

    def arrivals(self, *, vocab_size: int, seed: int) -> list[Arrival]:
        """The bursts, by time."""
        times = arrival_times(self.num_bursts, self.bursts_per_s, np.random.default_rng(seed))
        source, names = TokenSource(vocab_size, seed), iter(range(1 << 32))
        arrivals = []
        for at_s in times:
            prefix = Run(next(names), self.prefix_tokens)
            arrivals += [
                Arrival(
                    float(at_s),
                    (prefix, Run(next(names), self.unique_tokens)),
                    self.max_new_tokens,
                    next(names),
                    source,
                )
                for _ in range(self.siblings)
            ]
        return arrivals


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations: every turn's prompt holds all turns and answers before it. Lengths of turns are exponential.

    Turns come at times that were drawn beforehand, whether or not the last answer is there: an open loop, like a trace.
    """

    num_chats: int
    turns: int
    num_systems: int
    """Chats draw one of so many system prompts."""
    system_tokens: int
    user_tokens: int
    """Mean."""
    answer_tokens: int
    """Mean."""
    think_s: float
    """Mean time between two turns; never less than a fifth of it."""
    chats_per_s: float

    def arrivals(self, *, vocab_size: int, seed: int) -> list[Arrival]:
        """All turns of all chats, by time."""
        random = np.random.default_rng(seed)
        source, names = TokenSource(vocab_size, seed), iter(range(self.num_systems, 1 << 32))
        begins = arrival_times(self.num_chats, self.chats_per_s, random)
        turns = [turn for begin in begins for turn in self._chat(float(begin), random, names, source)]
        return sorted(turns, key=lambda arrival: arrival.at_s)

    def _chat(
        self, begin_s: float, random: np.random.Generator, names: Iterator[int], source: TokenSource
    ) -> Iterator[Arrival]:
        history: tuple[Run, ...] = (Run(int(random.integers(self.num_systems)), self.system_tokens),)
        pauses = self.think_s * (0.2 + 0.8 * random.exponential(size=self.turns))
        users = 1 + random.exponential(self.user_tokens, self.turns).astype(int)
        answers = 1 + random.exponential(self.answer_tokens, self.turns).astype(int)
        for at_s, user, answer in zip(begin_s + np.cumsum(pauses) - pauses[0], users, answers, strict=True):
            history += (Run(next(names), int(user)),)
            said = Run(next(names), int(answer))
            yield Arrival(float(at_s), history, said.length, said.name, source)
            history += (said,)


def arrival_times(count: int, requests_per_s: float | None, random: np.random.Generator) -> Times:
    """Moments of a Poisson process, ascending; all 0 without a rate."""
    if requests_per_s is None:
        return np.zeros(count)
    return np.cumsum(random.exponential(1 / requests_per_s, size=count))

"""Rates out of totals: what consoles show of a worker, or of a fleet, is computed here and nowhere else.

Whoever did something counts it up for ever (`Totals` in the worker, `PromptTokens` in the router). Two readings of a
counter, and the time between them, are a `Recent`; a `Recent` has `Rates` and a `HitSplit`. Pure functions on frozen
values, without a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add, attrgetter
from typing import Any, TypeVar

from radixfleet.telemetry import TTFT_BUCKETS_S


@dataclass(frozen=True, slots=True)
class Totals:
    """What a worker has done since its engine started: see the message of this name."""

    requests: int = 0
    finished_requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    bubble_s: float = 0.0
    retractions: int = 0
    out_of_memory: int = 0
    ttft_counts: tuple[int, ...] = (0,) * (len(TTFT_BUCKETS_S) + 1)
    """Requests by time to first token: one count for each of TTFT_BUCKETS_S, and one for what took longer."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens of started requests, as the router predicted and as the workers found them."""

    asked: int = 0
    reachable: int = 0
    """Thought to be cached on the eligible worker that holds most of the prompt."""
    predicted: int = 0
    """Thought to be cached on the chosen worker."""
    actual: int = 0
    mispredicted: int = 0
    """Sum of |predicted - actual| over the requests, in whole routing blocks: what could have been predicted."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What was added to the totals in the last `seconds`."""

    seconds: float
    totals: Totals = field(default_factory=Totals)
    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)


@dataclass(frozen=True, slots=True)
class Rates:
    """A `Recent` as rates and shares. None: nothing happened from which the figure could be told."""

    seconds: float
    """Length of the time that the figures are about."""
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float | None
    """Share of the prompt tokens that were found in the cache."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    bubble_share: float | None
    """Share of the time with work in which the device waited for the CPU."""
    busy_share: float
    """Share of the whole time that the device spent in steps. Of a fleet, the sum of its workers' shares."""


@dataclass(frozen=True, slots=True)
class HitSplit:
    """Where the prompt tokens that were asked for went: four shares of them, none below 0, which together make 1."""

    hit: float
    """Found in the worker's cache."""
    workload: float
    """On no eligible worker: nobody had seen them lately."""
    routing: float
    """On an eligible worker, but another one was cheaper, and did not have them."""
    index: float
    """Predicted, but not there."""
    prediction_error: float
    """`PromptTokens.mispredicted` as a share of what was asked for: no part of the four above."""


def increase(now: Totals, before: Totals) -> Totals:
    """By how much a worker's totals grew. Totals that fell began again with a new engine: then all of `now` is new."""
    if now.requests < before.requests or now.steps < before.steps:
        return now
    return _merged(now, before, _grown)


def joined(one: Totals, other: Totals) -> Totals:
    """The sum."""
    return _merged(one, other, add)


def prompt_increase(now: PromptTokens, before: PromptTokens) -> PromptTokens:
    """By how much the router's own counts grew: they never fall."""
    grown: map[int] = map(_grown, _PROMPT(now), _PROMPT(before))
    return PromptTokens(*grown)


def prompts_joined(one: PromptTokens, other: PromptTokens) -> PromptTokens:
    """The sum."""
    return PromptTokens(*map(add, _PROMPT(one), _PROMPT(other)))


def rates(recent: Recent) -> Rates:
    """Of a stretch of time. A stretch of no length has rates of 0."""
    totals, seconds = recent.totals, recent.seconds
    per_s = 1.0 / seconds if seconds > 0 else 0.0
    with_work_s = totals.step_s + totals.bubble_s
    return Rates(
        seconds=seconds,
        requests_per_s=totals.requests * per_s,
        prompt_tokens_per_s=totals.prompt_tokens * per_s,
        output_tokens_per_s=totals.generated_tokens * per_s,
        hit_rate=totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else None,
        ttft_p50_s=quantile(0.5, totals.ttft_counts, TTFT_BUCKETS_S),
        ttft_p99_s=quantile(0.99, totals.ttft_counts, TTFT_BUCKETS_S),
        bubble_share=totals.bubble_s / with_work_s if with_work_s > 0 else None,
        busy_share=totals.step_s * per_s,
    )


def hit_split(prompts: PromptTokens) -> HitSplit | None:
    """Why the hit rate is what it is. None when nothing was asked for.

    The router knows of whole blocks, workers cache pages, and know of what they cached a moment ago: so more may be
    cached than was predicted, or thought reachable. What was cached counts as that, and as nothing else.
    """
    if not prompts.asked:
        return None
    share = 1.0 / prompts.asked
    hit = min(prompts.actual, prompts.asked)
    predicted = max(hit, min(prompts.predicted, prompts.asked))
    reachable = max(predicted, min(prompts.reachable, prompts.asked))
    return HitSplit(
        hit=hit * share,
        workload=(prompts.asked - reachable) * share,
        routing=(reachable - predicted) * share,
        index=(predicted - hit) * share,
        prediction_error=prompts.mispredicted * share,
    )


def quantile(share: float, counts: Sequence[int], bounds: Sequence[float]) -> float | None:
    """The value below which `share` of what was counted lies, as Prometheus estimates it; None without any count.

    `bounds` are the buckets' upper ends, ascending; `counts` has one count for each and one for what lies above. Within
    a bucket values are taken to be spread evenly; what lies above the last bound is only known to be at least that.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0.0
    lower = 0.0
    for count, upper in zip(counts, bounds, strict=False):
        if count and below + count >= wanted:
            return lower + (upper - lower) * (wanted - below) / count
        below += count
        lower = upper
    return lower


def ttft_bucket(ttft_s: float) -> int:
    """Where in `ttft_counts` a time to first token is counted."""
    return bisect_left(TTFT_BUCKETS_S, ttft_s)


NumberT = TypeVar("NumberT", int, float)

_NAMES = tuple(name for name in Totals.__dataclass_fields__ if name != "ttft_counts")
_NUMBERS = attrgetter(*_NAMES)
_PROMPT = attrgetter(*PromptTokens.__dataclass_fields__)


def _grown(now: NumberT, before: NumberT) -> NumberT:
    return max(now - before, type(now)(0))


def _merged(one: Totals, other: Totals, merge: Callable[[Any, Any], Any]) -> Totals:
    """Field by field. Versions of radixfleet may differ in their buckets: then only those of `one` count."""
    counts = one.ttft_counts
    if len(counts) == len(other.ttft_counts):
        counts = tuple(map(merge, counts, other.ttft_counts))
    numbers: dict[str, Any] = dict(zip(_NAMES, map(merge, _NUMBERS(one), _NUMBERS(other)), strict=True))
    return Totals(**numbers, ttft_counts=counts)

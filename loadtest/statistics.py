"""Figures of a run: hit rates, latencies, throughput, fairness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.results import FloatArray, Outcome, RunResult
from radixfleet.blocks import BLOCK_TOKENS

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count as good (a service level objective)."""

    ttft_s: float = 1.0
    inter_token_s: float = 0.05
    """On average over the request."""

    def is_met(self, outcome: Outcome) -> bool:
        """Whether the request was complete, and fast enough."""
        if not outcome.is_complete or outcome.first_token_s is None or outcome.ended_s is None:
            return False
        following = max(1, outcome.output_tokens - 1)
        mean_gap_s = (outcome.ended_s - outcome.first_token_s) / following
        return outcome.first_token_s - outcome.arrived_s <= self.ttft_s and mean_gap_s <= self.inter_token_s


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles of times, in seconds; all 0 where there are no times."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: FloatArray, counts: np.ndarray | None = None) -> Percentiles:
        """Of `values`, each of which occurs `counts` times (once without). A percentile is one of the values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        weights = np.ones(len(values)) if counts is None else counts.astype(np.float64)
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(weights[order])
        ranks = np.searchsorted(reached, np.array(PERCENTS) / 100 * reached[-1], side="left")
        p50, p90, p99 = (float(values[order[min(rank, len(values) - 1)]]) for rank in ranks)
        return cls(float(np.average(values, weights=weights)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Split:
    """Where the prompt tokens went: five shares of them that together make 1, named by what the hit was lost to.

    The router's four counters (asked, reachable, predicted, actual) give the first three and the sum of the last two,
    the workload's part. A worker may find more than was predicted, for it knows of its last step; that counts as hit.
    """

    hit: float
    index: float
    """Predicted, and not there."""
    routing: float
    """On an eligible worker, but another one was cheaper."""
    gone: float
    """An earlier prompt or answer had them, but no eligible worker does: evicted, or not computed yet."""
    new: float
    """In no earlier prompt or answer."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. Rates are shares of prompt tokens, throughputs are per second of the whole run."""

    policy: str
    requests: int
    failed: int
    duration_s: float
    hit_rate: float
    ceiling: float
    """What a cache that keeps everything, shared by all workers, would have hit."""
    reachable_rate: float
    """ceiling - reachable: evicted, or not computed yet. reachable - predicted: given up for a less loaded worker."""
    predicted_rate: float
    """predicted - hit: lost to the router's index."""
    prediction_error: float
    """|predicted - found| cached blocks, both summed over all requests, divided by the blocks found (by the prompts'
    blocks where none was found). In whole blocks, because routers predict only these, while workers find tokens."""
    request_prediction_error: float
    """The same with the difference taken for each request before it is summed, so that predictions that are too high
    for some requests and too low for others do not cancel."""
    tells_routes: bool
    """Whether the router told its predictions. If not, the reachable, predicted and error figures above mean nothing.
    """
    ttft_s: Percentiles
    queue_s: Percentiles
    """From arrival to the first step."""
    inter_token_s: Percentiles
    latency_s: Percentiles
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    steady_output_tokens_per_s: float
    """The same from the start to the last arrival: what is decoded after it is not counted, for there one long answer
    may decide how long the run lasts. Over the whole run where all arrive at the start."""
    goodput: float
    """Good requests a second."""
    good_share: float
    request_shares: tuple[float, ...]
    """Each worker's share of the requests."""
    work_shares: tuple[float, ...]
    """Each worker's share of the tokens computed: prompts less what was cached, and answers."""
    busy_share: float | None
    """Mean over the workers of the time in which they computed; None where it is not known."""

    @property
    def max_to_mean_work(self) -> float | None:
        """The most loaded worker's work over the mean; 1 is even; None where no worker is known to have computed."""
        return max(self.work_shares) * len(self.work_shares) if any(self.work_shares) else None

    @property
    def split(self) -> Split:
        """Where the prompt tokens went."""
        predicted = max(self.hit_rate, self.predicted_rate)
        reachable = max(predicted, self.reachable_rate)
        ceiling = max(reachable, self.ceiling)
        return Split(
            hit=self.hit_rate,
            index=predicted - self.hit_rate,
            routing=reachable - predicted,
            gone=ceiling - reachable,
            new=1.0 - ceiling,
        )


def summarize(result: RunResult, objective: Objective) -> Summary:
    """The figures of a run. Latencies and hit rates are those of requests that were begun."""
    outcomes = result.outcomes
    begun = [outcome for outcome in outcomes if outcome.first_token_s is not None]
    complete = [outcome for outcome in outcomes if outcome.is_complete]
    good = sum(objective.is_met(outcome) for outcome in outcomes)
    duration_s = result.duration_s or 1.0
    prompt_tokens = sum(outcome.prompt_tokens for outcome in begun) or 1
    missed = [outcome.predicted_tokens // BLOCK_TOKENS - outcome.cached_tokens // BLOCK_TOKENS for outcome in begun]
    found = sum(outcome.cached_tokens // BLOCK_TOKENS for outcome in begun) or _blocks(begun) or 1
    return Summary(
        policy=result.policy,
        requests=len(outcomes),
        failed=len(outcomes) - len(complete),
        duration_s=result.duration_s,
        hit_rate=sum(outcome.cached_tokens for outcome in begun) / prompt_tokens,
        ceiling=sum(outcome.ceiling_tokens for outcome in begun) / prompt_tokens,
        reachable_rate=sum(outcome.reachable_tokens for outcome in begun) / prompt_tokens,
        predicted_rate=sum(outcome.predicted_tokens for outcome in begun) / prompt_tokens,
        prediction_error=abs(sum(missed)) / found,
        request_prediction_error=sum(map(abs, missed)) / found,
        tells_routes=any(outcome.tries for outcome in outcomes),
        ttft_s=Percentiles.of(_since_arrival(begun, "first_token_s")),
        queue_s=Percentiles.of(_since_arrival(begun, "started_s")),
        inter_token_s=Percentiles.of(result.gaps_s, result.gap_tokens),
        latency_s=Percentiles.of(_since_arrival(complete, "ended_s")),
        requests_per_s=len(complete) / duration_s,
        prompt_tokens_per_s=sum(outcome.prompt_tokens for outcome in complete) / duration_s,
        output_tokens_per_s=sum(outcome.output_tokens for outcome in complete) / duration_s,
        steady_output_tokens_per_s=_steady_rate(complete, outcomes[-1].arrived_s or duration_s if outcomes else 1.0),
        goodput=good / duration_s,
        good_share=good / len(outcomes) if outcomes else 0.0,
        request_shares=_shares(result, [(outcome, 1) for outcome in begun]),
        work_shares=_shares(result, [(outcome, _work(outcome)) for outcome in begun]),
        busy_share=sum(result.busy_s) / duration_s / len(result.busy_s) if result.busy_s else None,
    )


def _steady_rate(outcomes: Sequence[Outcome], until_s: float) -> float:
    """Output tokens a second until then. Of an answer that was not at its end, those that came if all came evenly."""
    tokens = 0.0
    for outcome in outcomes:
        if outcome.first_token_s is not None and outcome.ended_s is not None and outcome.first_token_s <= until_s:
            answered_s = outcome.ended_s - outcome.first_token_s
            share = min(1.0, (until_s - outcome.first_token_s) / answered_s) if answered_s else 1.0
            tokens += 1 + share * (outcome.output_tokens - 1)
    return tokens / until_s


def _blocks(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.prompt_tokens // BLOCK_TOKENS for outcome in outcomes)


def _since_arrival(outcomes: Sequence[Outcome], moment: str) -> FloatArray:
    """Without those of which the moment is not known."""
    moments = ((getattr(outcome, moment), outcome.arrived_s) for outcome in outcomes)
    return np.array([at_s - arrived_s for at_s, arrived_s in moments if at_s is not None], dtype=np.float64)


def _work(outcome: Outcome) -> int:
    return outcome.prompt_tokens - outcome.cached_tokens + outcome.output_tokens


def _shares(result: RunResult, weights: Sequence[tuple[Outcome, int]]) -> tuple[float, ...]:
    totals = [0] * result.num_workers
    for outcome, weight in weights:
        if outcome.worker >= 0:
            totals[outcome.worker] += weight
    whole = sum(totals) or 1
    return tuple(total / whole for total in totals)

"""A comparison on several seeds: what one seed gives may be luck, most of all in the tails and on small fleets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from loadtest.statistics import Summary


@dataclass(frozen=True, slots=True)
class Standing:
    """A policy over all seeds: each figure is the mean of the seeds' figures, unless it says otherwise."""

    policy: str
    hit_rate: float
    ttft_s: float
    ttft_error_s: float
    """Standard error of the mean, as all errors here; 0 with one seed."""
    output_tokens_per_s: float
    failed: int
    """Requests, of all seeds together."""
    ttft_over_best: float
    """Mean of the ratios to the policy with the least mean TTFT, seed by seed, so that what all policies find hard on a
    seed cancels out."""
    ttft_over_best_error: float


def standings(by_seed: Sequence[Sequence[Summary]]) -> list[Standing]:
    """The standing of each policy. All seeds have the same policies, in the same order."""
    by_policy = list(zip(*by_seed, strict=True))
    best = min(by_policy, key=lambda summaries: fmean(_ttfts_s(summaries)))
    found = []
    for summaries in by_policy:
        ttfts_s = _ttfts_s(summaries)
        over_best, over_best_error = paired(ttfts_s, _ttfts_s(best))
        found.append(
            Standing(
                policy=summaries[0].policy,
                hit_rate=fmean(each.hit_rate for each in summaries),
                ttft_s=fmean(ttfts_s),
                ttft_error_s=standard_error(ttfts_s),
                output_tokens_per_s=fmean(each.output_tokens_per_s for each in summaries),
                failed=sum(each.failed for each in summaries),
                ttft_over_best=over_best,
                ttft_over_best_error=over_best_error,
            )
        )
    return found


def _ttfts_s(summaries: Sequence[Summary]) -> list[float]:
    return [each.ttft_s.mean for each in summaries]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean of the ratios, seed by seed, and its standard error. A ratio of two nothings is 1."""
    ratios = [mine / other if other else 1.0 for mine, other in zip(ours, theirs, strict=True)]
    return fmean(ratios), standard_error(ratios)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of `values`; 0 for a single value, from which no spread can be told."""
    return float(stdev(values)) / len(values) ** 0.5 if len(values) > 1 else 0.0

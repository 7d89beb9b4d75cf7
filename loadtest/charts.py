"""The charts of a comparison: each a title and an SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loadtest.results import RunResult
from loadtest.statistics import Percentiles, Summary
from loadtest.svg import BarGroup, Line, bars, lines

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#6c6c6c", "#7b3294", "#a6761d", "#e7298a")
"""After Okabe and Ito: told apart with most kinds of colour blindness."""

Figure = Callable[[Summary], float]


def charts(results: Sequence[RunResult], summaries: Sequence[Summary]) -> list[tuple[str, str]]:
    """All of them, in order. `results` and `summaries` belong together, and give each policy its colour."""
    tokens = {
        "reachable": lambda s: s.reachable_rate,
        "predicted": lambda s: s.predicted_rate,
        "hit": lambda s: s.hit_rate,
    }
    rates = {"all": lambda s: s.requests_per_s, "within the objective": lambda s: s.goodput}
    ceiling = max((summary.ceiling for summary in summaries), default=0.0)
    return [
        (
            "Prompt tokens: reachable, predicted, found in a cache",
            bars(_groups(summaries, tokens), "of prompt tokens", mark=("ceiling", ceiling)),
        ),
        ("Time to first token", bars(_latencies(summaries, lambda s: s.ttft_s), "s", log=True)),
        ("Requests with a first token within", lines(_ttft_curves(results), "s", "of requests", log_x=True)),
        ("Time between two tokens", bars(_latencies(summaries, lambda s: s.inter_token_s), "s", log=True)),
        ("Output tokens", bars(_groups(summaries, {"": lambda s: s.output_tokens_per_s}), "a second")),
        ("Requests", bars(_groups(summaries, rates), "a second")),
        ("Work of each worker, the most loaded first", lines(_share_curves(summaries), "worker", "of the mean")),
        ("Requests that wait for their first step", lines(_queue_curves(results), "s", "requests")),
    ]


def color_of(place: int) -> int:
    """The colour of the policy at this place."""
    return place % len(COLORS)


def _groups(summaries: Sequence[Summary], figures: dict[str, Figure]) -> list[BarGroup]:
    return [
        BarGroup(label, [(summary.policy, color_of(place), figure(summary)) for place, summary in enumerate(summaries)])
        for label, figure in figures.items()
    ]


def _latencies(summaries: Sequence[Summary], of: Callable[[Summary], Percentiles]) -> list[BarGroup]:
    return _groups(
        summaries,
        {
            "mean": lambda s: of(s).mean,
            "p50": lambda s: of(s).p50,
            "p90": lambda s: of(s).p90,
            "p99": lambda s: of(s).p99,
        },
    )


def _ttft_curves(results: Sequence[RunResult]) -> list[Line]:
    curves = []
    for place, result in enumerate(results):
        times = np.sort([o.first_token_s - o.arrived_s for o in result.outcomes if o.first_token_s is not None])
        shares = np.arange(1, len(times) + 1) / max(1, len(result.outcomes))
        curves.append(Line(result.policy, color_of(place), times, shares))
    return curves


def _share_curves(summaries: Sequence[Summary]) -> list[Line]:
    return [
        Line(
            summary.policy,
            color_of(place),
            [float(rank) for rank in range(1, len(summary.work_shares) + 1)],
            [share * len(summary.work_shares) for share in sorted(summary.work_shares, reverse=True)],
        )
        for place, summary in enumerate(summaries)
    ]


def _queue_curves(results: Sequence[RunResult]) -> list[Line]:
    """Over the time of the longest run: how many had arrived and not begun."""
    until_s = max((result.duration_s for result in results), default=1.0)
    moments = np.linspace(0.0, until_s, 300)
    curves = []
    for place, result in enumerate(results):
        arrived = np.sort([outcome.arrived_s for outcome in result.outcomes])
        left = np.sort([_left_queue_s(outcome.started_s, outcome.ended_s) for outcome in result.outcomes])
        waiting = np.searchsorted(arrived, moments, side="right") - np.searchsorted(left, moments, side="right")
        curves.append(Line(result.policy, color_of(place), moments, waiting.astype(float)))
    return curves


def _left_queue_s(started_s: float | None, ended_s: float | None) -> float:
    """When a request stopped waiting: when it was begun, or, if it never was, when it failed."""
    moment_s = started_s if started_s is not None else ended_s
    return moment_s if moment_s is not None else float("inf")

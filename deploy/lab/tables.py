"""The results of a comparison as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from deploy.lab.repetition import Standing
from loadtest.statistics import Summary
from loadtest.svg import number

_LEGEND = (
    "hit rate + what was lost to the index's error, to routing elsewhere, gone (evicted, or not computed yet) and new "
    "(seen before by nobody) = 1. off: predicted against found, in blocks, as a share of what was found, in sum and "
    "request by request"
)


def results_tables(summaries: Sequence[Summary]) -> tuple[Table, ...]:
    """What became of the prompt tokens, latencies, throughput: a row a policy in each."""
    return _caching(summaries), _latencies(summaries), _throughput(summaries)


def _caching(summaries: Sequence[Summary]) -> Table:
    """Hits, and what the others were lost to: a row of shares makes 1. Then how far predictions were off."""
    table = _table("prompt tokens", "hit rate", "index", "routing", "gone", "new", "off, sum", "each")
    for summary in summaries:
        split = summary.split
        lost = [f"{share:.3f}" for share in (split.index, split.routing, split.gone)]
        errors = [f"{100 * share:.1f}%" for share in (summary.prediction_error, summary.request_prediction_error)]
        if not summary.tells_routes:
            lost, errors = ["-"] * len(lost), ["-"] * len(errors)
        table.add_row(summary.policy, f"{split.hit:.3f}", *lost, f"{split.new:.3f}", *errors)
    table.caption = _LEGEND
    table.caption_justify = "left"
    return table


def _latencies(summaries: Sequence[Summary]) -> Table:
    table = _table("times", "TTFT s", "p50", "p90", "p99", "ms a token p50", "p90", "p99")
    for summary in summaries:
        ttft, gap = summary.ttft_s, summary.inter_token_s
        times = [number(seconds) for seconds in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)]
        times += [number(1000 * seconds) for seconds in (gap.p50, gap.p90, gap.p99)]
        # No answer took no time.
        table.add_row(summary.policy, *(times if ttft.p99 else ["-"] * len(times)))
    return table


def _throughput(summaries: Sequence[Summary]) -> Table:
    table = _table("a second", "tokens out", "steady", "answered", "good ones", "max/mean", "busy", "failed")
    for summary in summaries:
        table.add_row(
            summary.policy,
            number(summary.output_tokens_per_s),
            number(summary.steady_output_tokens_per_s),
            number(summary.requests_per_s),
            number(summary.goodput),
            "-" if summary.max_to_mean_work is None else f"{summary.max_to_mean_work:.2f}",
            "-" if summary.busy_share is None else f"{summary.busy_share:.2f}",
            str(summary.failed),
        )
    table.caption = (
        "tokens and requests answered to the end, over the whole time to the last answer's end; steady: tokens out "
        "until the last request came, which no long answer at the end decides. max/mean: work of the busiest worker"
    )
    table.caption_justify = "left"
    return table


def seeds_table(standings: Sequence[Standing], num_seeds: int) -> Table:
    """Policies over several seeds, the one of least mean TTFT, which is what is called the best, first."""
    table = _table(f"{num_seeds} seeds", "hit rate", "TTFT s", "±", "tokens/s", "over best", "±", "failed")
    for each in sorted(standings, key=lambda standing: standing.ttft_s):
        table.add_row(
            each.policy,
            f"{each.hit_rate:.3f}",
            number(each.ttft_s),
            number(each.ttft_error_s),
            number(each.output_tokens_per_s),
            f"{each.ttft_over_best:.3f}",
            f"{each.ttft_over_best_error:.3f}",
            str(each.failed),
        )
    table.caption = (
        "means over the seeds, with their standard errors; tokens: of answers; over best: TTFT over the first "
        "policy's, seed by seed; failed: requests of all seeds. The tables above are of the first seed"
    )
    table.caption_justify = "left"
    return table


def ratios_table(summaries: Sequence[Summary], baseline: str = "round_robin") -> list[Table]:
    """Everybody's figures over those of `baseline`; no table where that policy was not run, or nothing else was."""
    base = next((summary for summary in summaries if summary.policy == baseline), None)
    if base is None or len(summaries) < 2:
        return []
    table = _table(f"over {baseline}", "hit rate", "output tokens/s", "good ones/s", "TTFT mean", "TTFT p99")
    for summary in summaries:
        pairs = (
            (summary.hit_rate, base.hit_rate),
            (summary.output_tokens_per_s, base.output_tokens_per_s),
            (summary.goodput, base.goodput),
            (summary.ttft_s.mean, base.ttft_s.mean),
            (summary.ttft_s.p99, base.ttft_s.p99),
        )
        table.add_row(summary.policy, *(f"{ours / theirs:.2f}" if theirs else "-" for ours, theirs in pairs))
    return [table]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True, min_width=0 if place else 13)
    return table

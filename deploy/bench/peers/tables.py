"""The comparison with peers, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from deploy.bench.medians import Interval
from deploy.bench.peers.comparison import OURS, Contestant, Figures
from deploy.bench.peers.questions import Questions

_COLUMNS = ("output tokens/s", "of ours", "TTFT p50 ms", "of ours", "ms a token", "alike", "rounds")


def contestants_table(contestants: Sequence[Contestant]) -> Table:
    """Who took part, with what."""
    table = Table(box=None, pad_edge=False)
    for column in ("engine", "version", "weights"):
        table.add_column(column)
    for each in contestants:
        table.add_row(each.name, each.title, each.dtype)
    return table


def workload_table(questions: Questions, rows: Sequence[Figures]) -> Table:
    """A row a contestant."""
    table = Table(title=questions.text, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tokens_per_s:,.0f}",
            _ratio(row.tokens_ratio, row.tokens_interval),
            f"{row.ttft_p50_ms:,.0f}",
            _ratio(row.ttft_ratio, row.ttft_interval),
            f"{row.inter_token_ms:.1f}",
            "" if row.name == OURS else f"{row.agreement:.0%}",
            str(row.rounds),
        )
    return table


def _ratio(median: float, interval: Interval | None) -> str:
    """The interval, which takes six rounds, only where the rounds differ: our own ratio is 1 in each."""
    if interval is None or interval == (median, median):
        return f"{median:.2f}"
    return f"{median:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"

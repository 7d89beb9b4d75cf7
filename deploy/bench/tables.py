"""Tables of the benchmarks, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from deploy.bench.chunks import ChunkFigures
from deploy.bench.overlap import Comparison, Figures


def comparison_table(comparison: Comparison) -> Table:
    """A column a loop."""
    table = Table(title=comparison.name, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("overlapped", justify="right")
    table.add_column("serial", justify="right")
    both = (comparison.overlapped, comparison.serial)
    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("steps", lambda it: f"{it.steps:,}"),
        ("step, median ms", lambda it: f"{it.step_ms:.1f}"),
        ("bubble, median us", lambda it: f"{it.bubble_p50_us:,.0f}"),
        ("bubble, mean us", lambda it: f"{it.bubble_mean_us:,.0f}"),
        ("bubble, median, % of a step", lambda it: f"{it.bubble_p50_percent:.2f}"),
        ("bubble, of all time, %", lambda it: f"{it.bubble_percent:.2f}"),
        ("scheduling a step, us", lambda it: f"{it.scheduling_us:,.0f}"),
        ("CPU time of the engine a step, us", lambda it: f"{it.engine_cpu_us:,.0f}"),
        ("output tokens/s", lambda it: f"{it.tokens_per_s:,.0f}"),
        ("discarded tokens", lambda it: f"{it.discarded_tokens:,}"),
    ]
    for name, show in rows:
        table.add_row(name, *map(show, both))
    interval = comparison.speedup_interval
    sure = f"95 %: {interval[0]:.2f} to {interval[1]:.2f}" if interval else "95 %: unknown under 6 rounds"
    table.add_row("tokens/s, overlapped / serial", f"{comparison.speedup:.2f}", sure)
    return table


def chunks_table(figures: Sequence[ChunkFigures], prompt_tokens: int) -> Table:
    """A row a chunk size; times in ms."""
    title = f"a running answer, while prompts of {prompt_tokens:,} tokens come in"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("chunk", "inter-token p50 ms", "p99", "max", "TTFT of the prompts, ms"):
        table.add_column(column, justify="right")
    for each in figures:
        times_ms = (each.inter_token_p50_ms, each.inter_token_p99_ms, each.inter_token_max_ms, each.ttft_ms)
        table.add_row(f"{each.chunk_tokens:,}", *(f"{time_ms:,.0f}" for time_ms in times_ms))
    return table

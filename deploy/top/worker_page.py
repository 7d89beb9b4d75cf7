"""All about one worker."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.top.bars import stacked
from deploy.top.numbers import UNKNOWN, duration, percent, quantity, rate
from deploy.top.workers_table import STATE_STYLES, kv_bar
from radixfleet.overview import WorkerRow
from radixfleet.rates import hit_split
from radixfleet.settings import format_bytes

POOL_STYLES = ("magenta", "cyan", "yellow")
"""Weights, KV cache, activations."""
HIT_STYLES = ("green", "yellow", "magenta", "bright_black")
"""Prompt tokens: cached, lost to the index, lost to the routing, new."""


def worker_page(row: WorkerRow, width: int) -> RenderableType:
    """Its state, requests, memory, speed and prompts, and what its operator should change."""
    bar = max(10, min(40, width - 50))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    state = Text(row.state, STATE_STYLES.get(row.state, ""))
    if row.note:
        state.append(f"  gets no requests: {row.note}")
    grid.add_row("worker", f"{row.worker}  {row.address}")
    grid.add_row("state", state)
    grid.add_row("model", f"{row.model}  (radixfleet {row.version})" if row.model else UNKNOWN)
    grid.add_row(
        "requests",
        f"{row.running} running, {row.waiting} waiting, at most {row.max_running} at once; "
        f"{quantity(row.outstanding_prompt_tokens)} prompt tokens to compute",
    )
    grid.add_row("memory", _pools(row, bar))
    grid.add_row("KV pool", _kv(row, bar))
    grid.add_row("speed", _speed(row))
    grid.add_row("prompts", _prompts(row))
    grid.add_row("sketch", f"{quantity(row.sketch_blocks)} blocks, {'approximate' if row.approximate else 'exact'}")
    troubles = _troubles(row)
    if troubles:
        grid.add_row("trouble", Text(troubles, "yellow"))
    for advice in row.advice:
        grid.add_row("advice", Text(advice, "yellow"))
    return Group(grid, Text())


def _pools(row: WorkerRow, bar: int) -> Text:
    memory = row.memory
    if not memory.total_bytes:
        return Text(UNKNOWN)
    sizes = (memory.weights_bytes, memory.kv_bytes, memory.activations_bytes)
    text = stacked(list(zip(sizes, POOL_STYLES, strict=True)), memory.total_bytes, bar)
    for name, size, style in zip(("weights", "KV", "activations"), sizes, POOL_STYLES, strict=True):
        text.append(f"  {format_bytes(size)} ", style).append(name)
    return text.append(f", of {format_bytes(memory.total_bytes)} on {memory.device}")


def _kv(row: WorkerRow, bar: int) -> Text:
    kv = row.kv
    return Text.assemble(
        kv_bar(kv, bar),
        f"  {quantity(kv.used)} used, {quantity(kv.evictable)} cached, {quantity(kv.free)} free",
        f" of {quantity(kv.total)} tokens",
    )


def _speed(row: WorkerRow) -> str:
    pace = row.pace
    return (
        f"{rate(pace.output_tokens_per_s)} tokens/s, {rate(pace.requests_per_s)} requests/s; TTFT p50 "
        f"{duration(pace.ttft_p50_s)}, p99 {duration(pace.ttft_p99_s)}; device busy {percent(pace.busy_share)}, "
        f"bubble {percent(pace.bubble_share, 1)}"
    )


def _prompts(row: WorkerRow) -> str:
    prompts, split = row.prompt_tokens, hit_split(row.prompt_tokens)
    if split is None:
        return f"hit rate {percent(row.pace.hit_rate)}; none from this router in the last minute"
    return (
        f"hit rate {percent(row.pace.hit_rate)}; {quantity(prompts.asked)} tokens asked, "
        f"{quantity(prompts.reachable)} reachable, {quantity(prompts.predicted)} predicted, "
        f"{quantity(prompts.actual)} cached; predictions missed by {percent(split.prediction_error, 1)}"
    )


def _troubles(row: WorkerRow) -> str:
    pace = row.pace
    counts = (
        (pace.retractions, "retractions"),
        (pace.out_of_memory, "steps out of memory"),
        (pace.failed_requests, "failed requests"),
    )
    told = ", ".join(f"{number} {what}" for number, what in counts if number)
    return f"{told} in the last {pace.window_s:.0f} s" if told else ""

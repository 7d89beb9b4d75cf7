"""The table of workers: a row each, in columns that do not move from one second to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from deploy.top.bars import stacked
from deploy.top.numbers import duration, percent, rate
from deploy.top.view import View
from radixfleet.overview import KvPool, WorkerRow

STATE_STYLES = {
    "serving": "green",
    "loading": "yellow",
    "draining": "yellow",
    "failed": "bold red",
    "disconnected": "red",
}
USED, EVICTABLE = "cyan", "blue"
"""Of KV bars: what requests hold, and cached prefixes that could leave."""
_NUMBERS = {"run": 4, "wait": 4, "KV": 4, "hit": 4, "tok/s": 6, "TTFT": 6, "bubble": 6}
_SORTED = {
    "worker": "worker",
    "state": "state",
    "requests": "run",
    "KV": "KV",
    "hit rate": "hit",
    "tokens/s": "tok/s",
    "TTFT": "TTFT",
    "bubble": "bubble",
}
"""Sort -> the column that shows it."""
_WIDE = 100


@dataclass(frozen=True, slots=True)
class _Widths:
    worker: int
    state: int
    model: int
    """0: not shown, for the fleet's line says it."""
    bar: int


def workers_table(rows: Sequence[WorkerRow], view: View, *, width: int, selected: int | None, models: int) -> Table:
    """The rows, in the given order. `selected`: which of them is marked; `models`: how many the fleet serves."""
    widths = _widths(rows, width, models)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    marked = _SORTED[view.sort]
    for name, size in _columns(widths):
        style = "bold underline" if name == marked else "bold"
        is_number = name in _NUMBERS
        table.add_column(
            Text(name, style),
            justify="right" if is_number else "left",
            width=size,
            no_wrap=True,
            overflow="ellipsis",
        )
    for index, row in enumerate(rows):
        worker, *others = _cells(row, widths)
        if index == selected:
            worker.stylize("reverse")
            worker.pad_right(widths.worker - len(worker))
        table.add_row(worker, *others)
    return table


def kv_bar(kv: KvPool, width: int) -> Text:
    """Used, evictable, free."""
    return stacked(((kv.used, USED), (kv.evictable, EVICTABLE)), kv.total, width)


def _widths(rows: Sequence[WorkerRow], width: int, models: int) -> _Widths:
    names = max((len(row.worker) for row in rows), default=0)
    state = max((len(_state(row)) for row in rows), default=5)
    model = 0
    if models > 1 or width >= _WIDE:
        model = min(max(5, *(len(row.model) for row in rows)), 24 if width >= _WIDE else 10)
    taken = sum(_NUMBERS.values()) + len(_NUMBERS) + max(state, 5) + 1 + (model + 1 if model else 0) + 2
    left = max(12, width - taken)
    bar = min(24, max(4, left - max(6, names)))
    return _Widths(min(max(6, names), max(6, left - bar)), max(state, 5), model, bar)


def _columns(widths: _Widths) -> list[tuple[str, int]]:
    columns = [("worker", widths.worker), ("state", widths.state)]
    if widths.model:
        columns.append(("model", widths.model))
    columns += [("run", _NUMBERS["run"]), ("wait", _NUMBERS["wait"]), ("KV pool", widths.bar)]
    return columns + [(name, _NUMBERS[name]) for name in ("KV", "hit", "tok/s", "TTFT", "bubble")]


def _cells(row: WorkerRow, widths: _Widths) -> list[Text]:
    is_heard = row.state != "disconnected"
    cells = [Text(row.worker), Text(_state(row), STATE_STYLES.get(row.state, ""))]
    if widths.model:
        cells.append(Text(row.model))
    pace = row.pace
    numbers = (
        percent(row.kv.used / row.kv.total) if row.kv.total else "-",
        percent(pace.hit_rate),
        rate(pace.output_tokens_per_s),
        duration(pace.ttft_p50_s),
        percent(pace.bubble_share, 1),
    )
    cells += [Text(str(row.running)), Text(str(row.waiting)), kv_bar(row.kv, widths.bar)]
    return cells + [Text(number if is_heard else "-") for number in numbers]


def _state(row: WorkerRow) -> str:
    """With a mark where there is more to say: the worker's own page says it."""
    return f"{row.state}{'!' if row.note or row.advice else ''}"

"""What `radixfleet top` draws: a frame, made of what is known and how the user wants to see it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.top.bars import stacked, trend
from deploy.top.numbers import age, duration, percent, quantity, rate
from deploy.top.view import KEYS, Page, View
from deploy.top.worker_page import HIT_STYLES, worker_page
from deploy.top.workers_table import EVICTABLE, STATE_STYLES, USED, kv_bar, workers_table
from radixfleet.overview import FleetRow, Overview, WorkerRow

_FIXED_LINES = 9
"""Of the screen: five of the fleet, a blank one, the table's head, one below the table, the foot."""
_BAR = 12
_WIDE = 100


@dataclass(frozen=True, slots=True)
class Frame:
    """All that a screen depends on, but its size."""

    endpoint: str
    overview: Overview | None
    """None: the router has not answered yet."""
    problem: str = ""
    """Why there is no newer word."""
    silent_s: float = 0.0
    """Since the last word."""
    speeds: Sequence[float] = ()
    """The fleet's tokens/s, the newest last."""


def screen(frame: Frame, view: View, *, width: int, height: int) -> RenderableType:
    """A whole screen."""
    if view.page is Page.HELP:
        return Group(_help(), _filler(height - len(KEYS) - 3), _foot(view))
    if frame.overview is None:
        return Group(*_head(frame, width), Text(), Text("Waiting for the router.", "bright_black"))
    workers = view.ordered(frame.overview.workers)
    room = height - _FIXED_LINES - bool(frame.problem)
    if view.page is Page.WORKER and workers:
        body: RenderableType = worker_page(workers[view.index(workers)], width)
    else:
        body = _workers(workers, view, frame.overview, width=width, room=max(1, room))
    return Group(*_head(frame, width), Text(), body, _foot(view))


def once(frame: Frame, view: View, *, width: int) -> RenderableType:
    """The fleet and all its workers, for a pipe or a log: no selection, no keys."""
    if frame.overview is None:
        return Group(*_head(frame, width))
    workers = view.ordered(frame.overview.workers)
    models = len(frame.overview.fleet.models)
    advice = [Text(f"{row.worker}: {text}", "yellow") for row in workers for text in row.advice]
    table = workers_table(workers, view, width=width, selected=None, models=models)
    return Group(*_head(frame, width), Text(), table, *advice)


def _workers(workers: Sequence[WorkerRow], view: View, overview: Overview, *, width: int, room: int) -> RenderableType:
    if not workers:
        return Text("The router knows no workers. Start one: radixfleet worker --model demo --routers HOST:PORT")
    selected = view.index(workers)
    first = max(0, min(selected - room // 2, len(workers) - room))
    shown = workers[first : first + room]
    table = workers_table(shown, view, width=width, selected=selected - first, models=len(overview.fleet.models))
    if len(shown) == len(workers):
        return Group(table, _filler(room - len(shown) + 1))
    return Group(table, Text(f"{first + 1} to {first + len(shown)} of {len(workers)} workers", "bright_black"))


def _head(frame: Frame, width: int) -> list[RenderableType]:
    problem = []
    if frame.problem:
        since = f" for {age(frame.silent_s)}" if frame.overview is not None else ""
        problem = [Text(f"No answer{since}, trying again: {frame.problem}", "black on yellow")]
        problem[0].truncate(width, overflow="ellipsis")
    if frame.overview is None:
        return [Text.assemble(("radixfleet", "bold"), f"  {frame.endpoint}"), *problem]
    fleet = frame.overview.fleet
    bar = _BAR if width < _WIDE else 2 * _BAR
    title = Text.assemble(("radixfleet", "bold"), f"  {frame.endpoint}  ", _states(fleet))
    title.append(f"  up {age(fleet.uptime_s)}  {_models(fleet)}  {fleet.policy}")
    lines = [
        title,
        _line("requests", _requests(fleet)),
        _line("speed", _speed(fleet, frame.speeds, bar)),
        _line("prompts", _prompts(fleet, bar)),
        _line("KV pools", _kv(fleet, bar)),
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return [lines[0], *problem, *lines[1:]]


def _line(label: str, text: Text) -> Text:
    return Text.assemble((f"{label:<10}", "bold"), text)


def _models(fleet: FleetRow) -> str:
    return fleet.models[0] if len(fleet.models) == 1 else f"{len(fleet.models)} models"


def _states(fleet: FleetRow) -> Text:
    parts = [Text(f"{number} {state}", STATE_STYLES[state]) for state, number in fleet.states.items() if number]
    return Text(", ").join(parts) if parts else Text("no workers", "yellow")


def _requests(fleet: FleetRow) -> Text:
    queued = Text(f"{fleet.queued} queued", "yellow" if fleet.queued else "")
    return Text.assemble(
        f"{fleet.in_flight:>5} in flight   {fleet.running} running   {fleet.waiting} waiting   ", queued
    )


def _speed(fleet: FleetRow, speeds: Sequence[float], bar: int) -> Text:
    pace = fleet.pace
    return Text.assemble(
        (f"{trend(speeds, bar)} ", "green"),
        f"{rate(pace.output_tokens_per_s):>6} tokens/s out  {rate(pace.prompt_tokens_per_s):>6} in  ",
        f"TTFT p50 {duration(pace.ttft_p50_s)}  p99 {duration(pace.ttft_p99_s)}",
    )


def _prompts(fleet: FleetRow, bar: int) -> Text:
    split = fleet.split
    if split is None:
        return Text.assemble(stacked((), 1.0, bar), "  no prompts in the last minute")
    shares = tuple(max(0.0, share) for share in (split.hit, split.index, split.routing, split.workload))
    parts = stacked([(share, style) for share, style in zip(shares, HIT_STYLES, strict=True)], 1.0, bar)
    words = [
        Text.assemble((f"{percent(share):>4} ", style), name)
        for share, style, name in zip(shares, HIT_STYLES, ("cached", "lost to index", "to routing", "new"), strict=True)
    ]
    return Text(" ").join([parts, *words])


def _kv(fleet: FleetRow, bar: int) -> Text:
    kv = fleet.kv
    whole = kv.total or 1
    return Text.assemble(
        kv_bar(kv, bar),
        (f" {percent(kv.used / whole):>4} ", USED),
        "used ",
        (f"{percent(kv.evictable / whole):>4} ", EVICTABLE),
        f"cached {percent(kv.free / whole):>4} free of {quantity(kv.total)}",
        f"  bubble {percent(fleet.pace.bubble_share, 1)}",
    )


def _help() -> RenderableType:
    grid = Table.grid(padding=(0, 3, 0, 0))
    for key, text in KEYS:
        grid.add_row(Text(key, "bold"), text)
    return Group(Text("Keys", "bold"), Text(), grid)


def _foot(view: View) -> Text:
    order = f"by {view.sort}{' (reversed)' if view.reverse else ''}"
    return Text(f"q quit   ? help   enter worker   s sort: {order}", "bright_black")


def _filler(lines: int) -> Text:
    """So that the foot stands at the bottom."""
    return Text("\n" * max(0, lines - 1))

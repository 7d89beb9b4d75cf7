"""Draws panels of the dashboards from a real run: `python -m tests.monitoring.picture [deploy/pictures/grafana.png]`.

The queries are the dashboards' own, answered by a real Prometheus that scraped a fleet under load: a router and two
workers with simulated devices, each in its three processes. In the second half of the run the prompts have more
prefixes than the caches have room for. Grafana is not needed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from deploy.monitoring.board import Panel, Unit
from deploy.monitoring.fleet_board import FLEET
from deploy.monitoring.worker_board import WORKERS
from tests.support.byte_tokenizer import END_ID
from tests.support.monitored_fleet import Phase, Recording, recorded, substituted
from worker.engine.config import EngineConfig
from worker.engine.process import ProcessEngine
from worker.runner.sim import CostModel, SimRunnerConfig

PHASES = (Phase(40, clients=6, prefixes=4), Phase(40, clients=12, prefixes=12))
SCRAPE_S, INTERVAL_S, STEP_S, WARM_UP_S = 1.0, 8, 1.0, 9.0
COLORS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#f2495c", "#b877d9", "#8ab8ff", "#fade2a")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 440, 160, 52, 8, 18
ROWS = ("Now", "Cache", "Throughput", "Latency")
OF_WORKERS = ("KV tokens", "Steps by kind", "Bubble")
PAGE = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; padding: 12px; background: #111217; color: #ccccdc; font: 12px sans-serif; width: 1396px }
.grid { display: grid; grid-template-columns: repeat(12, 1fr); gap: 8px }
.panel { background: #181b1f; border: 1px solid #2b2e34; border-radius: 3px; padding: 8px }
h2 { font-size: 13px; font-weight: 500; margin: 10px 0 6px } h3 { font-size: 12px; font-weight: 500; margin: 0 0 4px }
.stat { font-size: 30px; color: #73bf69; text-align: center; padding: 6px 0 }
.legend { color: #9fa7b3; line-height: 16px; min-height: 16px }
.legend i { display: inline-block; width: 12px; height: 3px; margin: 0 4px 3px 0 }
.legend span { margin-right: 12px; white-space: nowrap } svg { display: block }
svg text { fill: #9fa7b3; font-size: 10px }
</style>"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One curve of a panel."""

    name: str
    values: Sequence[float]


def engine() -> ProcessEngine:
    """A device that is slow and has a small pool."""
    runner = SimRunnerConfig(
        vocab_size=END_ID + 1,
        kv_tokens=3072,
        max_running_requests=4,
        chunked_prefill_size=512,
        max_context_tokens=3072,
        cost=CostModel(step_s=0.02, prefill_token_s=1e-4),
    )
    return ProcessEngine(EngineConfig(runner=runner, log_level="warning"))


def main() -> None:
    """Record, draw, photograph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "target", nargs="?", type=Path, default=Path("deploy/pictures/grafana.png"), help="default: that"
    )
    target: Path = parser.parse_args().target
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium on this machine: apt-get install -y chromium")
    print(f"loading a fleet for {sum(phase.seconds for phase in PHASES):.0f} s")
    with recorded(*PHASES, engine=engine, scrape_s=SCRAPE_S) as recording, tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(PAGE + _body(recording))
        target.parent.mkdir(parents=True, exist_ok=True)
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1420,1140"]
        subprocess.run([chromium, *options, f"--screenshot={target}", page.as_uri()], check=True, capture_output=True)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def _body(recording: Recording) -> str:
    rows = [row for row in FLEET.rows if row.title in ROWS]
    parts = [f"<h2>{row.title}</h2>{_grid(row.panels, recording)}" for row in rows]
    chosen = [panel for panel in WORKERS.panels if panel.title in OF_WORKERS]
    parts.append(f"<h2>Workers</h2>{_grid(chosen, recording)}")
    return "".join(parts)


def _grid(panels: Sequence[Panel], recording: Recording) -> str:
    return f'<div class="grid">{"".join(_panel(panel, recording) for panel in panels)}</div>'


def _panel(panel: Panel, recording: Recording) -> str:
    curves = [curve for query in panel.queries for curve in _curves(query.expr, query.legend, recording)]
    inside = _stat(curves[0], panel.unit) if panel.is_stat else _chart(curves, panel) + _legend(curves, panel.unit)
    return (
        f'<div class="panel" style="grid-column: span {panel.width // 2}"><h3>{escape(panel.title)}</h3>{inside}</div>'
    )


def _curves(expr: str, legend: str, recording: Recording) -> list[Drawn]:
    asked = substituted(expr, interval=f"{INTERVAL_S}s")
    found = recording.prometheus.curves(asked, recording.began_s + WARM_UP_S, recording.ended_s, STEP_S)
    assert found, expr
    return [Drawn(_name(legend, curve.labels), _values(curve.points)) for curve in found]


def _name(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), legend)


def _values(points: Sequence[tuple[float, float]]) -> list[float]:
    return [0.0 if value != value else value for _, value in points]


def _stat(curve: Drawn, unit: Unit) -> str:
    return f'<div class="stat">{_number(curve.values[-1], unit)}</div>'


def _legend(curves: Sequence[Drawn], unit: Unit) -> str:
    items = [
        f'<span><i style="background:{color}"></i>{escape(curve.name)} {_number(curve.values[-1], unit)}</span>'
        for curve, color in zip(curves, itertools.cycle(COLORS), strict=False)
        if any(curve.values)
    ]
    return f'<div class="legend">{"".join(items)}</div>'


def _chart(curves: Sequence[Drawn], panel: Panel) -> str:
    """Lines, or areas upon each other."""
    length = max(len(curve.values) for curve in curves)
    floors = [0.0] * length
    bands: list[tuple[list[float], list[float]]] = []
    for curve in curves:
        values = [*[0.0] * (length - len(curve.values)), *curve.values]
        tops = [floor + value for floor, value in zip(floors, values, strict=True)] if panel.stacked else values
        bands.append((floors, tops))
        floors = tops if panel.stacked else floors
    ticks = _ticks(min(0.0, *(min(tops) for _, tops in bands)), max(max(tops) for _, tops in bands))
    low, high = ticks[0], ticks[-1]

    def place(index: int, value: float) -> str:
        x = LEFT + index / max(1, length - 1) * (WIDTH - LEFT - 4)
        return f"{x:.1f},{(HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low)) + TOP:.1f}"

    parts = []
    for value in ticks:
        x, y = place(0, value).split(",")
        parts.append(f'<line x1="{x}" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#2b2e34"/>')
        parts.append(
            f'<text x="{LEFT - 5}" y="{float(y) + 3:.1f}" text-anchor="end">{_number(value, panel.unit)}</text>'
        )
    for index, (below, tops) in enumerate(bands):
        color = COLORS[index % len(COLORS)]
        line = " ".join(place(at, value) for at, value in enumerate(tops))
        back = " ".join(place(at, value) for at, value in reversed(list(enumerate(below))))
        opacity = 0.3 if panel.stacked else 0.06
        parts.append(f'<polygon points="{line} {back}" fill="{color}" opacity="{opacity}"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.4"/>')
    for index in range(0, length, 15):
        x = place(index, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 3}" text-anchor="middle">{index * STEP_S:.0f} s</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Round values, the first at most `low`, the last at least `high`."""
    high = high if high > low else low + 1.0
    span = high - low
    step = 10 ** math.floor(math.log10(span / 3))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 4)
    return [step * count for count in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _number(value: float, unit: Unit) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
    if unit == "bytes":
        return f"{value / 1024**3:.3g} GiB"
    end = "/s" if unit in ("reqps", "ops") else ""
    return (f"{value / 1000:.3g}k" if abs(value) >= 1000 else f"{value:.3g}") + end


if __name__ == "__main__":
    main()

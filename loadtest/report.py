"""One HTML page for a comparison: figures and charts, with nothing to load from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from loadtest.charts import COLORS, charts, color_of
from loadtest.results import RunResult
from loadtest.statistics import Summary
from loadtest.svg import number

_STYLE = """
:root { --ink: #222; --faint: #ddd; --paper: #fff; COLORS }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --faint: #444; --paper: #1b1b1b } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1320px;
       margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1em; margin: 0 0 .3em }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }
td, th { padding: .2em .7em; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap }
td:first-child, th:first-child, .facts td { text-align: left }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1.6em 1em }
.key span { display: inline-block; margin-right: 1.2em }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: var(--ink) }
.grid { stroke: var(--faint) } .mark { stroke: var(--ink); stroke-dasharray: 4 3 } .unit { text-anchor: middle }
p.note { max-width: 60em }
"""

_NOTE = (
    "Ceiling: what one cache for all workers that forgets nothing would have hit. Reachable: what the eligible worker "
    "that held most of each prompt was thought to hold. Predicted: the same of the chosen worker. Hit: what it really "
    "had. What is not hit was lost to the index (predicted, and not there), to routing (another worker was cheaper), "
    "is gone (evicted, or not computed yet), or new. Predictions are off by what was predicted too much or too little "
    "in each request, in whole blocks, as a share of what was found. Every chart has names and numbers under the "
    "pointer."
)


def _time(summary: Summary, time: float) -> str:
    """No answer took no time."""
    return number(time) if summary.ttft_s.p99 else "-"


_FIGURES: Mapping[str, Callable[[Summary], str]] = {
    "hit rate": lambda s: f"{s.hit_rate:.3f}",
    "predicted": lambda s: f"{s.predicted_rate:.3f}",
    "reachable": lambda s: f"{s.reachable_rate:.3f}",
    "ceiling": lambda s: f"{s.ceiling:.3f}",
    "lost to index": lambda s: f"{s.split.index:.3f}",
    "to routing": lambda s: f"{s.split.routing:.3f}",
    "gone": lambda s: f"{s.split.gone:.3f}",
    "new": lambda s: f"{s.split.new:.3f}",
    "predictions off": lambda s: f"{100 * s.request_prediction_error:.1f} %",
    "TTFT s, mean": lambda s: _time(s, s.ttft_s.mean),
    "p50": lambda s: _time(s, s.ttft_s.p50),
    "p90": lambda s: _time(s, s.ttft_s.p90),
    "p99": lambda s: _time(s, s.ttft_s.p99),
    "between tokens ms, p50": lambda s: _time(s, 1000 * s.inter_token_s.p50),
    "p90 ": lambda s: _time(s, 1000 * s.inter_token_s.p90),
    "p99 ": lambda s: _time(s, 1000 * s.inter_token_s.p99),
    "output tokens/s": lambda s: number(s.output_tokens_per_s),
    "answered/s": lambda s: number(s.requests_per_s),
    "within the objective/s": lambda s: number(s.goodput),
    "max/mean work": lambda s: "-" if s.max_to_mean_work is None else f"{s.max_to_mean_work:.2f}",
    "failed": lambda s: str(s.failed),
}


def html_report(
    title: str, facts: Mapping[str, str], results: Sequence[RunResult], summaries: Sequence[Summary]
) -> str:
    """The page. `facts`: what was run, by name; `results` and `summaries` belong together."""
    colors = " ".join(f"--c{index}: {color};" for index, color in enumerate(COLORS))
    told = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items())
    key = "".join(
        f'<span><i style="background: var(--c{color_of(place)})"></i>{escape(summary.policy)}</span>'
        for place, summary in enumerate(summaries)
    )
    drawn = "".join(f"<div><h2>{escape(name)}</h2>{svg}</div>" for name, svg in charts(results, summaries))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE.replace('COLORS', colors)}</style></head><body><h1>{escape(title)}</h1>"
        f'<table class="facts">{told}</table>{_figures(summaries)}<p class="note">{escape(_NOTE)}</p>'
        f'<p class="key">{key}</p><div class="charts">{drawn}</div></body></html>\n'
    )


def _figures(summaries: Sequence[Summary]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("policy", *_FIGURES))
    rows = "".join(
        f"<tr><td>{escape(summary.policy)}</td>"
        + "".join(f"<td>{escape(figure(summary))}</td>" for figure in _FIGURES.values())
        + "</tr>"
        for summary in summaries
    )
    return f"<table><tr>{head}</tr>{rows}</table>"

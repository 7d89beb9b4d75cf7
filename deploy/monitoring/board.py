"""A dashboard as plain data: rows of panels, each with its queries. `grafana` makes Grafana's JSON of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["short", "percentunit", "s", "bytes", "reqps", "ops"]
"""Grafana's names: a number, a share of 1, seconds, bytes, requests a second, anything else a second."""

WORKER = 'model=~"$model", worker_id=~"$worker"'
"""The series of the workers that are chosen at the top of the board."""
ROUTER = 'instance=~"$router"'
OF_WORKER = f'{ROUTER}, worker=~"$worker"'
"""A router's series of its workers."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    expr: str
    """PromQL, with the board's variables and $__rate_interval in it."""
    legend: str
    """Name of each series; {{label}} stands for a label's value."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture."""

    title: str
    queries: Sequence[Query]
    unit: Unit = "short"
    help: str = ""
    """What a high or low value means, and what to do."""
    stacked: bool = False
    is_stat: bool = False
    """One number instead of a curve."""
    width: int = 8
    """Of 24 columns."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below a heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    help: str
    variables: Sequence[Literal["model", "worker", "router"]]
    rows: Sequence[Row]

    @property
    def panels(self) -> list[Panel]:
        """All of them, in order."""
        return [panel for row in self.rows for panel in row.panels]


def rate(metric: str, labels: str, *, by: str = "") -> str:
    """Growth a second of a counter, summed."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping}(rate({metric}{{{labels}}}[$__rate_interval]))"


def total(metric: str, labels: str, *, by: str = "") -> str:
    """A gauge, summed."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping}({metric}{{{labels}}})"


def ratio(over: str, under: str) -> str:
    """One divided by the other; nothing while that is 0."""
    return f"{over} / {under}"


def quantile(share: float, metric: str, labels: str) -> str:
    """Quantile of a histogram, over all its series."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', labels, by='le')})"


def quantiles(metric: str, labels: str) -> list[Query]:
    """p50, p90 and p99."""
    return [Query(quantile(share, metric, labels), f"p{share * 100:.0f}") for share in (0.5, 0.9, 0.99)]

"""Grafana's JSON of the boards: `python -m deploy.monitoring.grafana` writes files/grafana/dashboards.

Needs grafana-foundation-sdk, a dependency of development: what it makes is committed, and a test makes it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from deploy.monitoring.board import Board, Panel
from deploy.monitoring.fleet_board import FLEET
from deploy.monitoring.router_board import ROUTERS
from deploy.monitoring.worker_board import WORKERS

BOARDS: Sequence[Board] = (FLEET, WORKERS, ROUTERS)
FOLDER = Path(__file__).parent / "files" / "grafana" / "dashboards"

_DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
_MODELS = "label_values(radixfleet_worker_build_info, model)"
_WORKERS = "label_values(radixfleet_worker_build_info, worker_id)"
_WORKERS_OF_MODELS = 'label_values(radixfleet_worker_build_info{model=~"$model"}, worker_id)'
_ROUTERS = "label_values(radixfleet_router_requests_in_flight, instance)"
_HEIGHT, _STAT_HEIGHT = 8, 4


def dashboard_json(board: Board) -> str:
    """The dashboard, as Grafana imports it."""
    builder = (
        dashboards.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags(["radixfleet"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboards.DashboardLink("Radixfleet")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["radixfleet"])
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
        .with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name in board.variables:
        builder = builder.with_variable(_variable(name, chosen=board.variables))
    numbers = itertools.count(1)
    for row in board.rows:
        builder = builder.with_row(dashboards.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            shown = _stat(panel) if panel.is_stat else _curves(panel)
            builder = builder.with_panel(shown.id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(builder.build()) + "\n"


def main() -> None:
    """Write all dashboards."""
    for board in BOARDS:
        (FOLDER / f"{board.uid}.json").write_text(dashboard_json(board))


def _variable(name: str, *, chosen: Collection[str]) -> dashboards.QueryVariable:
    workers = _WORKERS_OF_MODELS if "model" in chosen else _WORKERS
    query = {"model": _MODELS, "worker": workers, "router": _ROUTERS}[name]
    return (
        dashboards.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_DATASOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(query.expr).legend_format(query.legend or "__auto").ref_id(chr(ord("A") + index))
        for index, query in enumerate(panel.queries)
    ]


def _curves(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.help)
        .datasource(_DATASOURCE)
        .unit(panel.unit)
        .axis_soft_min(0)
        .span(panel.width)
        .height(_HEIGHT)
        .line_width(1)
        .fill_opacity(25 if panel.stacked else 5)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions().show_legend(show_legend=True).placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if panel.stacked:
        builder = builder.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    for target in _targets(panel):
        builder = builder.with_target(target)
    return builder


def _stat(panel: Panel) -> stat.Panel:
    builder = (
        stat.Panel()
        .title(panel.title)
        .description(panel.help)
        .datasource(_DATASOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(_STAT_HEIGHT)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    for target in _targets(panel):
        builder = builder.with_target(target)
    return builder


if __name__ == "__main__":
    main()

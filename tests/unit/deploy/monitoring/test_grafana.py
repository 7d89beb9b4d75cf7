"""The dashboards that are committed are those that the code makes."""

from __future__ import annotations

import json
import re

import pytest

from deploy.monitoring.board import Board
from deploy.monitoring.catalog import PROCESSES, families
from deploy.monitoring.grafana import BOARDS, FOLDER, dashboard_json

METRIC = re.compile(r"\bradixfleet_\w+")


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_the_committed_dashboard_is_up_to_date(board: Board) -> None:
    """On failure: python -m deploy.monitoring.grafana"""
    assert (FOLDER / f"{board.uid}.json").read_text() == dashboard_json(board)


def test_there_are_no_other_dashboards() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {board.uid for board in BOARDS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_have_numbers_of_their_own_and_variables_that_the_board_has(board: Board) -> None:
    dashboard = json.loads(dashboard_json(board))
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers)) == len(board.panels) + len(board.rows)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
    assert variables >= {"datasource", *board.variables}
    text = json.dumps(dashboard)
    assert set(re.findall(r"\$(\w+)", text)) - {"__all"} <= variables


def test_boards_ask_for_metrics_that_there_are() -> None:
    """Behaviour 63, without a Prometheus."""
    known = set()
    for process in PROCESSES:
        for family in families(process):
            ends = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
            known |= {family.name + end for end in ends}
    asked = {
        name for board in BOARDS for panel in board.panels for q in panel.queries for name in METRIC.findall(q.expr)
    }
    assert len(asked) > 40
    assert asked - known == set()

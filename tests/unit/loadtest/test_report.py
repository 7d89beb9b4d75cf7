"""The HTML page of a comparison."""

import re
from html.parser import HTMLParser

import pytest

from loadtest.charts import charts
from loadtest.report import html_report
from loadtest.results import RunResult
from loadtest.statistics import Objective, Summary, summarize
from tests.support.outcomes import failed, outcome, result


def runs() -> tuple[list[RunResult], list[Summary]]:
    results = [
        result([outcome(at / 10) for at in range(20)], policy="first", gaps=[(0.1, 200)]),
        result([outcome(0.0), failed(0.0), failed(1.0, ended_s=None)], policy="<second>", gaps=[(0.2, 10)]),
    ]
    return results, [summarize(each, Objective()) for each in results]


class _Page(HTMLParser):
    """Fails on a tag that is not closed in order; collects words and what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page() -> _Page:
    parser = _Page()
    parser.feed(html_report("A & B", {"workload": "one <hot> prefix"}, *runs()))
    return parser


def test_the_page_is_well_formed_and_loads_nothing(page: _Page):
    assert page.open == []
    assert page.loads == []
    html = html_report("t", {}, *runs())
    assert "<script" not in html
    assert not re.search(r"https?://|@import|url\(", html)


def test_the_page_tells_what_was_run_and_every_policys_figures(page: _Page):
    assert {"A & B", "workload", "one <hot> prefix", "first", "<second>"} <= set(page.text)
    assert "0.500" in page.text
    assert page.tags.count("tr") == 1 + 1 + 2


def test_there_is_a_chart_for_each_question(page: _Page):
    assert page.tags.count("svg") == len(charts(*runs())) == 8


def test_the_queue_is_those_who_arrived_and_did_not_begin():
    results, summaries = runs()
    drawn = dict(charts(results, summaries))["Requests that wait for their first step"]
    assert drawn.count("<polyline") == 2
    assert "<title>first</title>" in drawn


def test_a_comparison_of_nothing_can_be_drawn():
    assert "<svg" in html_report("empty", {}, [], [])

"""What is drawn, on a recorded console."""

import io

import pytest
from rich.console import Console

from deploy.top.screen import Frame, once, screen
from deploy.top.view import Page, View
from radixfleet.answers import FleetReport
from radixfleet.overview import overview
from radixfleet.types import WorkerStatus
from tests.support.fleet_reports import entry, recent, report

FLEET = report(
    entry("worker-0"),
    entry("worker-1", status=WorkerStatus.DRAINING, ineligible_reason="draining"),
    entry("worker-2", connected=False, ineligible_reason="disconnected"),
    entry("worker-3", ineligible_reason="breaker", advice=("Set --max-running-requests to 8.",)),
)


def drawn(frame: Frame, view: View | None = None, *, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, record=True, color_system=None)
    console.print(screen(frame, view or View(), width=width, height=height))
    return console.export_text().splitlines()


def frame(fleet: FleetReport = FLEET, **fields: object) -> Frame:
    return Frame("127.0.0.1:7070", overview(fleet), **fields)  # type: ignore[arg-type]


def line(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


@pytest.mark.parametrize("width", [80, 100, 132, 200])
def test_every_line_fits_and_no_number_is_cut(width):
    for page in Page:
        lines = drawn(frame(), View(page=page), width=width)
        assert max(map(len, lines)) <= width
        assert len(lines) <= 24
    row = line(drawn(frame(), width=width), "worker-0")
    for cell in ("serving", "4", "2", "40%", "75%", "50", "75ms", "10.0%"):
        assert f" {cell}" in row


def test_the_rows_tell_each_workers_state():
    lines = drawn(frame())
    assert " draining " in line(lines, "worker-1")
    assert " disconnected " in line(lines, "worker-2")
    assert line(lines, "worker-2").rstrip().endswith("-      -      -")
    assert " serving! " in line(lines, "worker-3")  # there is more to say


def test_the_head_tells_the_fleet():
    head = "\n".join(drawn(frame(speeds=(1.0, 5.0)))[:5])
    for text in ("127.0.0.1:7070", "up 1 h 1 min", "2 serving, 1 draining, 1 disconnected"):
        assert text in head
    for text in ("7 in flight", "1 queued", "50 tokens/s out", "TTFT p50 75ms  p99 100ms", "75% cached", "40% used"):
        assert text in head


def test_the_model_has_a_column_where_there_are_several():
    assert " model " not in line(drawn(frame()), "worker ")
    two = report(entry("worker-0"), entry("worker-1", model="qwen"))
    lines = drawn(frame(two))
    assert " model " in line(lines, "worker ")
    assert " qwen " in line(lines, "worker-1")
    assert "2 models" in lines[0]


def test_a_worker_page_says_all_of_it():
    text = "\n".join(drawn(frame(), View(page=Page.WORKER, selected="worker-3"), width=120))
    for part in (
        "gets no requests: breaker",
        "15.0 GiB weights",
        "7.0 GiB KV",
        "2.0 GiB activations",
        "4,000 used, 5,000 cached, 1,000 free of 10.0k tokens",
        "1,000 tokens asked, 900 reachable, 800 predicted, 750 cached",
        "predictions missed by 6.0%",
        "Set --max-running-requests to 8.",
    ):
        assert part in text


def test_trouble_of_the_last_minute_is_told():
    worker = entry(recent=(recent(10), recent(60, retractions=3, out_of_memory=1)))
    text = "\n".join(drawn(frame(report(worker)), View(page=Page.WORKER), width=120))
    assert "3 retractions, 1 steps out of memory in the last 60 s" in text


def test_a_router_that_does_not_answer_is_named_and_the_last_word_stays():
    lines = drawn(frame(problem="connection refused", silent_s=12.3))
    assert lines[1].startswith("No answer for 12 s, trying again: connection refused")
    assert line(lines, "worker-0")


def test_before_the_first_answer():
    lines = drawn(Frame("127.0.0.1:7070", None, problem="connection refused"))
    assert "No answer, trying again: connection refused" in lines[1]
    assert "Waiting for the router." in lines


def test_more_workers_than_lines_scroll_with_the_selection():
    many = report(*(entry(f"worker-{number:03}") for number in range(100)))
    lines = drawn(frame(many), View(selected="worker-050"))
    assert len(lines) <= 24
    assert any("worker-050" in each for each in lines)
    assert any("of 100 workers" in each for each in lines)
    assert "worker-099" in "\n".join(drawn(frame(many), View(selected="worker-099")))


def test_an_empty_fleet_says_what_to_do():
    assert any("radixfleet worker --model" in each for each in drawn(frame(report(recent=()))))


def test_columns_stand_still_when_numbers_change():
    busy = report(entry("worker-0", recent=(recent(generated_tokens=9_999_999), recent(60, ttft_s=99.0))))
    idle = report(entry("worker-0", recent=()))
    assert line(drawn(frame(busy)), "worker ") == line(drawn(frame(idle)), "worker ")


def test_once_prints_every_worker_and_its_advice():
    console = Console(file=io.StringIO(), width=80, record=True, color_system=None)
    console.print(once(frame(), View(sort="state"), width=80))
    text = console.export_text()
    assert all(f"worker-{number}" in text for number in range(4))
    assert "worker-3: Set --max-running-requests to 8." in text
    assert "q quit" not in text

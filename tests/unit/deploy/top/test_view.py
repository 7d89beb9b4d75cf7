"""Keys change what is shown, and only that."""

import pytest

from deploy.top.keys import names
from deploy.top.view import SORTS, Page, View
from radixfleet.overview import worker_row
from radixfleet.types import Load, WorkerStatus
from tests.support.fleet_reports import entry, recent

FAST = entry("fast", recent=(recent(generated_tokens=900), recent(60, ttft_s=0.02)), load=Load(9, 0, 0, 100, 0))
SLOW = entry("slow", recent=(recent(generated_tokens=10), recent(60, ttft_s=2.0)), load=Load(1, 5, 0, 9000, 0))
GONE = entry("gone", connected=False, recent=(), load=Load())
WORKERS = [worker_row(one) for one in (SLOW, GONE, FAST)]


def order(view: View) -> list[str]:
    return [row.worker for row in view.ordered(WORKERS)]


@pytest.mark.parametrize(
    ("key", "first", "last"),
    [
        ("n", "fast", "slow"),
        ("t", "fast", "gone"),
        ("f", "slow", "gone"),
        ("w", "fast", "gone"),
        ("k", "slow", "gone"),
        ("h", "fast", "gone"),
        ("b", "fast", "gone"),
        ("a", "fast", "gone"),
    ],
)
def test_each_order_has_a_key(key, first, last):
    ordered = order(View().pressed(key, WORKERS))
    assert (ordered[0], ordered[-1]) == (first, last)
    assert order(View().pressed(key, WORKERS).pressed("r", WORKERS))[0] == last


def test_s_goes_through_all_orders_and_back():
    view = View()
    seen = []
    for _ in SORTS:
        seen.append(view.sort)
        view = view.pressed("s", WORKERS)
    assert seen == list(SORTS)
    assert view == View()
    assert view.pressed("s", WORKERS).pressed("S", WORKERS) == View()


def test_the_selection_follows_the_worker_not_the_row():
    view = View().pressed("down", WORKERS)
    assert view.selected == "gone"
    by_speed = view.pressed("t", WORKERS)
    ordered = by_speed.ordered(WORKERS)
    assert ordered[by_speed.index(ordered)].worker == "gone"


def test_the_selection_stays_within_the_rows():
    assert View().pressed("up", WORKERS).selected == "fast"
    assert View().pressed("page-down", WORKERS).selected == "slow"
    assert View().pressed("end", WORKERS).pressed("down", WORKERS).selected == "slow"
    assert View().pressed("end", WORKERS).pressed("home", WORKERS).selected == "fast"


def test_a_selected_worker_that_went_away_gives_the_first():
    view = View(selected="nobody")
    assert view.index(view.ordered(WORKERS)) == 0
    assert view.pressed("down", WORKERS).selected == "gone"


def test_pages():
    page = View().pressed("down", WORKERS).pressed("enter", WORKERS)
    assert (page.page, page.selected) == (Page.WORKER, "gone")
    assert page.pressed("esc", WORKERS).page is Page.WORKERS
    assert page.pressed("enter", WORKERS).page is Page.WORKERS
    assert View().pressed("?", WORKERS).page is Page.HELP
    assert View().pressed("?", WORKERS).pressed("?", WORKERS).page is Page.WORKERS


@pytest.mark.parametrize("key", ["q", "ctrl-c"])
def test_leaving(key):
    assert View().pressed(key, ()).is_over


def test_keys_on_an_empty_fleet_do_nothing():
    for key in ("enter", "down", "x"):
        assert View().pressed(key, ()) == View()


def test_draining_workers_come_before_serving_ones_by_state():
    draining = worker_row(entry("z", status=WorkerStatus.DRAINING))
    assert [row.worker for row in View(sort="state", reverse=True).ordered([*WORKERS, draining])][:2] == ["gone", "z"]


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOAs", ["up", "s"]),
        ("\x1b", ["esc"]),
        ("\x1b[5~\x1b[6~", ["page-up", "page-down"]),
        ("\r\x7f\x03", ["enter", "backspace", "ctrl-c"]),
        ("\x1b[1;5Cq", ["q"]),  # an unknown sequence is passed over, not taken for letters
        ("\x1b[", []),
        ("é", ["é"]),
    ],
)
def test_names_of_keys(typed, keys):
    assert names(typed) == keys

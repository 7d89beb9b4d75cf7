"""The rows that all consoles show."""

import dataclasses
import json

import pytest

from radixfleet.overview import KvPool, overview, worker_row
from radixfleet.types import Load, WorkerStatus
from tests.support.fleet_reports import entry, recent, report


def test_a_worker_that_serves():
    row = worker_row(entry("w3", recent=(recent(10.0, generated_tokens=100), recent(60.0, generated_tokens=6000))))
    assert (row.worker, row.state, row.note, row.model) == ("w3", "serving", "", "llama")
    assert row.kv == KvPool(used=4000, evictable=5000, free=1000, total=10_000)
    assert row.pace.output_tokens_per_s == pytest.approx(10.0)  # of the short stretch
    assert row.pace.pace_window_s == 10.0
    assert row.pace.hit_rate == pytest.approx(0.75)
    assert row.pace.window_s == 60.0
    assert row.pace.prediction_error == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("fields", "state", "note"),
    [
        ({"connected": False, "ineligible_reason": "disconnected"}, "disconnected", ""),
        ({"status": WorkerStatus.DRAINING, "ineligible_reason": "draining"}, "draining", ""),
        ({"ineligible_reason": "breaker"}, "serving", "breaker"),
        ({"connected": False, "ineligible_reason": "never answered"}, "disconnected", "never answered"),
    ],
)
def test_why_a_worker_gets_no_requests(fields, state, note):
    row = worker_row(entry("w0", **fields))
    assert (row.state, row.note) == (state, note)


def test_a_worker_that_never_answered_goes_by_its_address():
    assert worker_row(entry("w0", worker_id="")).worker == "w0:7080"


def test_a_report_that_is_older_than_the_pool_leaves_nothing_below_zero():
    row = worker_row(entry(load=Load(kv_protected_tokens=9000, kv_evictable_tokens=5000)))
    assert row.kv.free == 0


def test_the_fleet_adds_its_workers_up():
    seen = overview(report(entry("b"), entry("a", model="qwen"), entry("c", connected=False)))
    assert [row.worker for row in seen.workers] == ["a", "b", "c"]
    fleet = seen.fleet
    assert fleet.states == {"serving": 2, "loading": 0, "draining": 0, "failed": 0, "disconnected": 1}
    assert (fleet.running, fleet.waiting, fleet.in_flight, fleet.queued) == (12, 6, 7, 1)
    assert fleet.models == ("llama", "qwen")
    assert fleet.kv == KvPool(12_000, 15_000, 3_000, 30_000)
    assert fleet.split is not None
    assert fleet.split.hit == pytest.approx(0.75)


def test_an_empty_fleet_of_a_router_that_has_just_started():
    seen = overview(report(recent=()))
    assert seen.workers == ()
    assert seen.fleet.pace.hit_rate is None
    assert seen.fleet.split is None


def test_rows_are_json():
    text = json.dumps(dataclasses.asdict(overview(report(entry()))))
    assert json.loads(text)["workers"][0]["pace"]["hit_rate"] == pytest.approx(0.75)

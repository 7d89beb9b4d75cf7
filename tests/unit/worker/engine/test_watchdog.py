"""When an engine counts as stuck."""

from __future__ import annotations

import numpy as np
import pytest

from radixfleet.types import Load
from worker.core.messages import Report
from worker.engine.watchdog import LoadWatch, Watchdog

NONE = np.empty(0, dtype=np.uint64)


def report(steps: int, *, running: int = 0, waiting: int = 0, step_age_s: float = 0.0) -> Report:
    return Report(
        load=Load(running_requests=running, waiting_requests=waiting),
        evicted_blocks=NONE,
        added_blocks=NONE,
        counters={"steps": float(steps)},
        step_age_s=step_age_s,
        step_s=[],
        bubble_s=[],
    )


def still_s_after(*reports: Report | None) -> float:
    watchdog = Watchdog(tick_s=2.0)
    for each in reports:
        watchdog.tick(each)
    return watchdog.still_s


def test_an_idle_engine_that_reports_is_alive() -> None:
    assert still_s_after(*(report(5) for _ in range(10))) == 0


def test_an_engine_that_steps_is_alive() -> None:
    assert still_s_after(*(report(step, running=3) for step in range(1, 10))) == 0


def test_silence_is_counted() -> None:
    last = report(5)
    assert still_s_after(last, last, last) == 4.0


def test_an_engine_that_never_reported_is_counted_too() -> None:
    assert still_s_after(None, None) == 4.0


@pytest.mark.parametrize(
    "work", [{"running": 1}, {"waiting": 1}, {"step_age_s": 0.5}], ids=["running", "waiting", "a step in flight"]
)
def test_work_without_steps_is_counted_although_reports_come(work: dict[str, float]) -> None:
    assert still_s_after(*(report(5, **work) for _ in range(4))) == 6.0  # type: ignore[arg-type]


def test_silence_and_standing_still_are_told_apart() -> None:
    """A step of 30 s is no silence; an engine that was stopped is not taken back before it has spoken."""
    watchdog = Watchdog(tick_s=1.0)
    for _ in range(30):
        watchdog.tick(report(5, running=1, step_age_s=1.0))
    assert (watchdog.silent_s, watchdog.still_s) == (0.0, 29.0)
    last = report(6, running=1)
    for _ in range(7):
        watchdog.tick(last)
    assert (watchdog.silent_s, watchdog.still_s) == (6.0, 6.0)
    watchdog.tick(report(6, running=1))
    assert (watchdog.silent_s, watchdog.still_s) == (0.0, 7.0), "it speaks, and its step goes on"


def test_one_more_step_ends_the_count() -> None:
    assert still_s_after(report(5, running=1), report(5, running=1), report(6, running=1)) == 0


def test_a_stopped_runner_is_counted_whatever_the_engine_says_and_a_slow_one_is_not() -> None:
    """Its engine goes on to report, and may have nothing to do."""
    watchdog = Watchdog(tick_s=2.0)
    for _ in range(3):
        watchdog.tick(report(5), is_runner_stopped=True)
    assert (watchdog.stopped_s, watchdog.still_s, watchdog.silent_s) == (6.0, 6.0, 0.0)
    watchdog.tick(report(5), is_runner_stopped=False)
    assert (watchdog.stopped_s, watchdog.still_s) == (0.0, 0.0)
    watchdog.tick(report(5, running=1, step_age_s=30.0))
    assert watchdog.stopped_s == 0.0


def load_still_s_after(*work: tuple[float, int]) -> float:
    watch = LoadWatch(tick_s=2.0)
    for cpu_s, read_bytes in work:
        watch.tick(cpu_s, read_bytes)
    return watch.still_s


def test_a_load_that_computes_or_reads_goes_on_however_long_it_takes() -> None:
    assert load_still_s_after(*((seconds * 2.0, 0) for seconds in range(1, 1000))) == 0
    assert load_still_s_after(*((0.0, megabytes) for megabytes in range(1, 1000))) == 0, "a slow disk"


def test_a_load_that_does_nothing_is_counted_from_its_last_work_on() -> None:
    assert load_still_s_after((3.0, 10), (3.0, 10), (3.0, 10)) == 4.0
    assert load_still_s_after((3.0, 10), (3.0, 10), (3.0, 11)) == 0.0


def test_a_process_that_only_looks_around_does_nothing() -> None:
    assert load_still_s_after((3.0, 10), *((3.0 + 0.02 * tick, 10) for tick in range(1, 51))) == 100.0


def test_what_is_done_after_one_of_a_loads_processes_has_ended_counts_although_all_is_less() -> None:
    assert load_still_s_after((30.0, 100), (1.0, 100), (1.5, 100)) == 0.0, "it computes"
    assert load_still_s_after((30.0, 100), (1.0, 10), (1.0, 11)) == 0.0, "it reads"
    assert load_still_s_after((30.0, 100), (1.0, 10), (1.0, 10)) == 4.0

from __future__ import annotations

from radixfleet.clock import ManualClock
from router.workers.breaker import Breaker, BreakerState

OPEN_S = 10.0


def broken(clock: ManualClock, failures: int = 3) -> Breaker:
    breaker = Breaker(failures=failures, open_s=OPEN_S, clock=clock)
    for _ in range(failures):
        fail(breaker, clock)
    assert breaker.state is BreakerState.OPEN
    return breaker


def fail(breaker: Breaker, clock: ManualClock) -> None:
    clock.advance(0.01)
    sent_at_s = clock.now()
    clock.advance(0.01)
    breaker.failure(sent_at_s=sent_at_s, probe=breaker.acquire())


def test_failures_in_a_row_open_it_and_an_answer_begins_the_row_anew() -> None:
    clock = ManualClock()
    breaker = Breaker(failures=3, open_s=OPEN_S, clock=clock)
    for _ in range(5):
        fail(breaker, clock)
        fail(breaker, clock)
        breaker.success(probe=breaker.acquire())
    assert breaker.state is BreakerState.CLOSED
    for _ in range(3):
        fail(breaker, clock)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits


def test_requests_that_fail_together_count_once() -> None:
    clock = ManualClock()
    breaker = Breaker(failures=3, open_s=OPEN_S, clock=clock)
    sent_at_s = clock.now()
    clock.advance(1.0)
    for _ in range(64):
        breaker.failure(sent_at_s=sent_at_s, probe=False)
    assert breaker.state is BreakerState.CLOSED


def test_half_open_lets_one_request_through() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    clock.advance(OPEN_S)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admits
    assert breaker.acquire()
    assert not breaker.admits


def test_a_probe_that_another_worker_answered_better_opens_it_again() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    clock.advance(OPEN_S)
    breaker.neither(probe=breaker.acquire())
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.failure(sent_at_s=clock.now(), probe=False)
    assert breaker.state is BreakerState.OPEN


def test_the_probes_answer_closes_it() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    clock.advance(OPEN_S)
    breaker.success(probe=breaker.acquire())
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admits


def test_the_probes_failure_opens_it_for_as_long_again() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    clock.advance(OPEN_S)
    probe = breaker.acquire()
    breaker.failure(sent_at_s=clock.now(), probe=probe)
    assert breaker.num_opened == 2
    clock.advance(OPEN_S / 2)
    assert breaker.state is BreakerState.OPEN
    clock.advance(OPEN_S / 2)
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_probe_that_tells_nothing_makes_room_for_the_next() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    clock.advance(OPEN_S)
    breaker.neither(probe=breaker.acquire())
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.acquire()


def test_an_answer_to_an_older_request_does_not_close_it() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    breaker.success(probe=False)
    assert breaker.state is BreakerState.OPEN


def test_a_new_engine_begins_with_a_clean_slate() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    breaker.reset()
    assert breaker.admits
    assert not breaker.acquire()

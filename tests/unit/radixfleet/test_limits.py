"""What one client may ask for."""

from __future__ import annotations

import pytest

from radixfleet.clock import ManualClock
from radixfleet.errors import InvalidRequest, Overloaded
from radixfleet.limits import ClientLimits


def visits(limits: ClientLimits, client: str, times: int) -> int:
    """How many of `times` requests were let in, one after the other."""
    admitted = 0
    for _ in range(times):
        try:
            with limits.visit(client):
                admitted += 1
        except Overloaded:
            pass
    return admitted


def test_the_bucket_holds_two_seconds_worth_and_gains_the_rate() -> None:
    clock = ManualClock()
    limits = ClientLimits(clock, max_requests_per_s=5)
    assert visits(limits, "a", 100) == 10
    clock.advance(1.0)
    assert visits(limits, "a", 100) == 5
    assert visits(limits, "b", 100) == 10  # clients do not share


def test_who_is_refused_learns_when_to_come_again() -> None:
    clock = ManualClock()
    limits = ClientLimits(clock, max_requests_per_s=0.5)
    assert visits(limits, "a", 2) == 1
    with pytest.raises(Overloaded, match=r"0\.5 requests a second: try again in 2 s") as caught, limits.visit("a"):
        pass
    assert caught.value.retry_after_s == pytest.approx(2.0)
    clock.advance(2.0)
    assert visits(limits, "a", 2) == 1


def test_open_requests_are_counted_until_they_end_however_they_end() -> None:
    limits = ClientLimits(ManualClock(), max_open_requests=2)
    with limits.visit("a"):
        with pytest.raises(KeyError), limits.visit("a"):
            raise KeyError("fails")
        with limits.visit("a"), pytest.raises(Overloaded) as caught, limits.visit("a"):
            pass
        assert caught.value.retry_after_s
    assert visits(limits, "a", 5) == 5


def test_a_request_that_is_refused_for_being_one_too_many_takes_nothing_from_the_rate() -> None:
    clock = ManualClock()
    limits = ClientLimits(clock, max_requests_per_s=1, max_open_requests=1)
    with limits.visit("a"):
        assert visits(limits, "a", 50) == 0
    assert visits(limits, "a", 50) == 1


def test_a_request_that_comes_to_many_is_let_in_and_paid_off() -> None:
    clock = ManualClock()
    limits = ClientLimits(clock, max_requests_per_s=1)
    with limits.visit("a"), limits.visit_more("a", 9):
        pass
    assert visits(limits, "a", 1) == 0
    with pytest.raises(Overloaded) as caught, limits.visit("a"):
        pass
    assert caught.value.retry_after_s == pytest.approx(9.0)
    clock.advance(9.0)
    assert visits(limits, "a", 100) == 1


def test_all_that_a_request_comes_to_is_open_until_it_ends() -> None:
    limits = ClientLimits(ManualClock(), max_open_requests=4)
    with limits.visit("a"):
        with limits.visit_more("a", 3):
            assert visits(limits, "a", 1) == 0
        assert visits(limits, "a", 1) == 1
        with limits.visit("a"), pytest.raises(Overloaded) as caught, limits.visit_more("a", 3):
            pass
        said = "1 request of this client is running, this one counts as 4, and at most 4 may run at once"
        assert str(caught.value) == said
        with pytest.raises(InvalidRequest, match="counts as 5 requests, and at most 4"), limits.visit_more("a", 4):
            pass
        assert visits(limits, "a", 9) == 9
    assert visits(limits, "a", 9) == 9


def test_a_request_comes_to_a_minutes_worth_at_most() -> None:
    """A hundred thousand prompts in one, and nothing of the client was let in for a day."""
    clock = ManualClock()
    limits = ClientLimits(clock, max_requests_per_s=0.5)
    with limits.visit("a"):
        with (
            pytest.raises(
                InvalidRequest, match=r"counts as 31 requests, and at 0\.5 requests a second one may come to 30"
            ),
            limits.visit_more("a", 30),
        ):
            pass
        with limits.visit_more("a", 29):
            pass
    with pytest.raises(Overloaded, match="try again in 60 s"), limits.visit("a"):
        pass
    clock.advance(60.0)
    assert visits(limits, "a", 2) == 1


def test_what_counts_more_must_be_visiting() -> None:
    limits = ClientLimits(ManualClock(), max_open_requests=4)
    with pytest.raises(KeyError), limits.visit_more("a", 1):
        pass


def test_idle_clients_are_forgotten() -> None:
    clock = ManualClock()
    limits = ClientLimits(clock, max_requests_per_s=1000, max_open_requests=5)
    with limits.visit("open"):
        for number in range(3000):
            clock.advance(0.01)
            assert visits(limits, f"c{number}", 1) == 1
        assert len(limits) < 1200
        # The one that is open is remembered through all of it.
        assert visits(limits, "open", 1) == 1
    assert visits(limits, "open", 1) == 1


def test_without_limits_nothing_is_remembered() -> None:
    limits = ClientLimits(ManualClock())
    assert visits(limits, "a", 10) == 10
    with limits.visit("a"), limits.visit_more("a", 10**6):
        pass
    assert len(limits) == 0

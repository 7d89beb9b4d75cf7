"""The rate that a token bucket lets through, whatever the times of the requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixfleet.clock import ManualClock
from radixfleet.errors import Overloaded
from radixfleet.limits import ClientLimits

RATES = st.sampled_from([0.1, 0.5, 1.0, 3.0, 7.5, 1000.0])
GAPS = st.lists(st.sampled_from([0.0, 0.001, 0.1, 0.3333, 1.0, 2.0, 7.0, 100.0]), min_size=1, max_size=60)


@given(RATES, GAPS)
def test_no_span_of_time_lets_more_through_than_burst_and_rate_allow(rate: float, gaps: list[float]) -> None:
    clock = ManualClock()
    limits = ClientLimits(clock, max_requests_per_s=rate)
    admitted_at_s: list[float] = []
    for gap in gaps:
        clock.advance(gap)
        try:
            with limits.visit("a"):
                admitted_at_s.append(clock.now())
        except Overloaded:
            pass
    burst = max(1.0, 2 * rate)
    for first, start_s in enumerate(admitted_at_s):
        for last in range(first, len(admitted_at_s)):
            assert last - first + 1 <= burst + rate * (admitted_at_s[last] - start_s) + 1e-6


@given(RATES, GAPS)
def test_who_waits_as_long_as_told_is_let_in(rate: float, gaps: list[float]) -> None:
    clock = ManualClock()
    limits = ClientLimits(clock, max_requests_per_s=rate)
    for gap in gaps:
        clock.advance(gap)
        try:
            with limits.visit("a"):
                continue
        except Overloaded as error:
            wait_s = error.retry_after_s
        assert wait_s is not None
        assert 0 < wait_s <= 1 / rate + 1e-9
        if wait_s > 1e-3:
            clock.advance(0.9 * wait_s)
            with pytest.raises(Overloaded), limits.visit("a"):
                pass
            clock.advance(0.1 * wait_s + 1e-6)
        else:
            clock.advance(wait_s + 1e-6)
        with limits.visit("a"):
            pass

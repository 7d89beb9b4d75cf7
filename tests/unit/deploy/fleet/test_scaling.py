"""How many workers a model shall have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.fleet.scaling import Limits, Scaling, WorkerLoad

LIMITS = Limits(min=1, max=8, up_after_s=10, down_after_s=60)


def load(running: int = 0, waiting: int = 0, kv_used: float = 0.0) -> WorkerLoad:
    return WorkerLoad(running, waiting, 16, kv_used)


def over_time(scaling: Scaling, seconds: range, queued: int, workers: list[WorkerLoad]) -> list[int]:
    return [scaling.decide(second, LIMITS, queued, workers) for second in seconds]


def test_a_moment_of_waiting_changes_nothing():
    scaling = Scaling(2)
    full = [load(16), load(16)]
    assert set(over_time(scaling, range(9), 5, full)) == {2}
    assert scaling.decide(9, LIMITS, 0, full) == 2
    assert set(over_time(scaling, range(10, 20), 5, full)) == {2}, "the time begins anew"


def test_waiting_adds_as_many_as_the_waiting_need_but_at_most_doubles():
    full = [load(16), load(16)]
    assert over_time(Scaling(2), range(11), 8, full)[-1] == 3
    assert over_time(Scaling(2), range(11), 32, full)[-1] == 4
    assert over_time(Scaling(2), range(11), 500, full)[-1] == 4
    assert over_time(Scaling(2), range(11), 0, [load(16, 8), load(16, 8)])[-1] == 3, "waiting in engines counts too"


def test_short_memory_adds_one():
    assert over_time(Scaling(2), range(11), 0, [load(4, kv_used=0.95), load(4, kv_used=0.92)])[-1] == 3
    assert over_time(Scaling(2), range(11), 0, [load(4, kv_used=0.95), load(4, kv_used=0.5)])[-1] == 2


def test_a_full_batch_without_waiting_is_how_it_should_be():
    assert over_time(Scaling(2), range(200), 0, [load(16), load(16)])[-1] == 2


def test_what_one_less_can_carry_is_given_up_after_long_idleness():
    quiet = [load(4), load(4), load(4)]
    counts = over_time(Scaling(3), range(62), 0, quiet)
    assert counts[59] == 3
    assert counts[60] == 2
    assert counts[61] == 2, "the time begins anew"


def test_memory_that_one_less_could_not_hold_keeps_it():
    assert over_time(Scaling(2), range(200), 0, [load(1, kv_used=0.4), load(1, kv_used=0.4)])[-1] == 2


def test_the_last_but_one_goes_only_when_nothing_runs():
    two = Limits(min=0, max=0, up_after_s=1, down_after_s=1)
    assert Scaling(1).decide(0, two, 0, [load(1)]) == 0, "bounds hold at once, whatever the load"
    assert over_time(Scaling(1), range(200), 0, [load(0)])[-1] == 1, "and never below the minimum"


def test_workers_that_are_still_loading_are_given_their_time():
    assert over_time(Scaling(4), range(100), 40, [load(16), load(16)])[-1] == 4, "two serve, four are wanted"


loads = st.lists(st.builds(WorkerLoad, st.integers(0, 20), st.integers(0, 9), st.just(16), st.floats(0, 1)), max_size=9)


@given(st.lists(st.tuples(st.floats(0.1, 30), st.integers(0, 100), loads), max_size=40), st.integers(0, 12))
def test_never_out_of_bounds_and_never_up_and_down_within_the_patience(history, count):
    """Hysteresis: after going up it takes `down_after_s` to go down."""
    scaling, now_s, raised_s, before = Scaling(count), 0.0, -1000.0, None
    for pause_s, queued, workers in history:
        now_s += pause_s
        decided = scaling.decide(now_s, LIMITS, queued, workers)
        assert LIMITS.min <= decided <= LIMITS.max
        if before is not None and decided > before:
            raised_s = now_s
        if before is not None and decided < before:
            assert now_s - raised_s >= LIMITS.down_after_s
            assert decided == before - 1
        before = decided

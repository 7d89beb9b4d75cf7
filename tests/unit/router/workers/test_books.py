from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixfleet.clock import ManualClock
from radixfleet.types import AcceptedLoad, Load
from router.workers.books import ON_THE_WAY_S, SETTLING_S, Booking, Books


def test_own_bookings_count_at_once() -> None:
    books = Books(ManualClock())
    books.book(300)
    books.book(50)
    assert books.outstanding_tokens == 350
    assert books.running_requests == 2


def test_the_first_token_takes_the_prompt_away_and_the_end_takes_the_request_away() -> None:
    books = Books(ManualClock())
    booking = books.book(300)
    books.computed(booking)
    assert (books.outstanding_tokens, books.running_requests) == (0, 1)
    books.close(booking)
    assert (books.outstanding_tokens, books.running_requests) == (0, 0)


def test_an_end_before_the_first_token_takes_both_away() -> None:
    books = Books(ManualClock())
    books.close(books.book(300))
    assert (books.own_tokens, books.own_requests) == (0, 0)


def test_the_workers_word_corrects_what_was_predicted() -> None:
    books = Books(ManualClock())
    booking = books.book(300)
    books.revise(booking, 40)
    assert books.outstanding_tokens == 40


def test_what_nobody_here_booked_is_the_work_of_others() -> None:
    books = Books(ManualClock())
    books.book(300)
    books.report(Load(running_requests=3, waiting_requests=1, outstanding_prompt_tokens=1000))
    assert books.outstanding_tokens == 1000
    assert books.running_requests == 4


def test_a_report_that_knows_our_booking_does_not_count_it_twice() -> None:
    clock = ManualClock()
    books = Books(clock)
    booking = books.book(300)
    for _ in range(20):
        books.report(Load(waiting_requests=1, outstanding_prompt_tokens=300))
        assert books.outstanding_tokens == 300
        assert books.running_requests == 1
        clock.advance(SETTLING_S / 10)
    books.close(booking)
    assert books.outstanding_tokens == 0


def test_a_report_from_before_our_booking_does_not_cancel_it() -> None:
    """Behaviour 45: a burst stays booked when an older report of an idle worker comes in."""
    books = Books(ManualClock())
    for _ in range(64):
        books.book(300)
    books.report(Load())
    assert books.outstanding_tokens == 64 * 300
    assert books.running_requests == 64


def test_a_report_from_before_the_first_token_leaves_no_phantom() -> None:
    clock = ManualClock()
    books = Books(clock)
    booking = books.book(300)
    books.computed(booking)
    books.report(Load(running_requests=1, outstanding_prompt_tokens=300))
    assert books.outstanding_tokens == 0
    books.close(booking)
    books.report(Load(running_requests=1))
    assert books.running_requests == 0


def test_a_long_prompt_that_is_half_computed_counts_half() -> None:
    clock = ManualClock()
    books = Books(clock)
    booking = books.book(32_000)
    clock.advance(SETTLING_S)
    books.report(Load(running_requests=1, outstanding_prompt_tokens=16_000))
    assert books.outstanding_tokens == 16_000
    young = books.book(1_000)
    assert books.outstanding_tokens == 17_000
    books.computed(booking)
    assert books.outstanding_tokens == 1_000
    books.close(booking)
    books.close(young)
    assert books.outstanding_tokens == 0


def test_the_progress_is_that_of_the_last_report_until_the_next() -> None:
    clock = ManualClock()
    books = Books(clock)
    books.book(32_000)
    clock.advance(SETTLING_S)
    half = Load(running_requests=1, outstanding_prompt_tokens=16_000)
    books.report(half)
    books.book(1_000)
    clock.advance(SETTLING_S)
    for accepted in (None, AcceptedLoad(2, 33_000), AcceptedLoad(3, 33_050)):
        books.report(half, accepted, is_between_reports=True)
        others = 50 if accepted and accepted.requests == 3 else 0
        assert books.outstanding_tokens == 17_000 + others
    books.report(half, AcceptedLoad(2, 33_000))
    assert books.outstanding_tokens == 16_000


def test_work_of_others_is_seen_again_once_our_own_has_settled() -> None:
    clock = ManualClock()
    books = Books(clock)
    books.close(books.book(300))
    clock.advance(SETTLING_S)
    books.report(Load(running_requests=1, outstanding_prompt_tokens=300))
    assert books.outstanding_tokens == 300
    assert books.running_requests == 1


def test_what_our_own_siblings_share_is_nobody_elses_work() -> None:
    """Behaviour 45: a worker counts a prefix in full for each prompt that waits for it; we booked it once."""
    books = Books(ManualClock())
    books.book(4_224)
    for _ in range(2):
        books.book(128)
    books.report(Load(running_requests=1, waiting_requests=2, outstanding_prompt_tokens=3 * 4_224))
    assert (books.outstanding_tokens, books.running_requests) == (4_224 + 2 * 128, 3)


def test_others_are_not_taken_for_more_than_their_share_of_the_requests() -> None:
    """Of three requests that wait for one prefix one is another router's."""
    books = Books(ManualClock())
    books.book(4_224)
    books.book(128)
    books.report(Load(running_requests=1, waiting_requests=2, outstanding_prompt_tokens=3 * 4_224))
    assert books.outstanding_tokens == 4_224 + 128 + 4_224


def test_what_is_accepted_beyond_our_own_is_the_work_of_others_before_any_engine_reports_it() -> None:
    """Behaviour 51: the engine's account is older than what the worker has accepted since."""
    books = Books(ManualClock())
    books.book(300)
    books.report(Load(), AcceptedLoad(3, 1000))
    assert (books.outstanding_tokens, books.running_requests) == (1000, 3)
    books.report(Load(), AcceptedLoad(1, 300))
    assert (books.outstanding_tokens, books.running_requests) == (300, 1)


def test_what_we_have_sent_and_the_worker_has_not_accepted_is_no_negative_work() -> None:
    books = Books(ManualClock())
    books.book(300)
    books.report(Load(), AcceptedLoad(0, 0))
    assert (books.outstanding_tokens, books.running_requests) == (300, 1)


def test_what_has_just_ended_here_is_not_taken_for_the_work_of_others() -> None:
    """Behaviour 51: no phantom load; and when it can be on its way no longer, what is accepted is theirs."""
    clock = ManualClock()
    books = Books(clock)
    first, second = books.book(300), books.book(50)
    books.computed(first)
    books.close(second)
    books.report(Load(), AcceptedLoad(2, 350))
    assert (books.outstanding_tokens, books.running_requests) == (0, 1)
    clock.advance(ON_THE_WAY_S)
    books.report(Load(), AcceptedLoad(2, 350))
    assert (books.outstanding_tokens, books.running_requests) == (350, 2)


def test_a_restart_forgets_what_the_old_engine_reported() -> None:
    books = Books(ManualClock())
    books.book(10)
    books.report(Load(running_requests=5, outstanding_prompt_tokens=1000, kv_protected_tokens=7))
    books.forget_reports()
    assert books.outstanding_tokens == 10
    assert books.running_requests == 1
    assert books.reported == Load()


def test_a_closed_booking_cannot_be_closed_again() -> None:
    books = Books(ManualClock())
    booking = books.book(1)
    books.close(booking)
    with pytest.raises(AssertionError, match="closed"):
        books.close(booking)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["book", "revise", "computed", "close", "report", "accepted", "early", "wait", "forget"]),
        st.integers(0, 500),
    ),
    max_size=60,
)


@given(STEPS)
def test_no_counter_goes_below_zero_and_all_end_at_zero(steps: list[tuple[str, int]]) -> None:
    """Behaviour 44: whatever comes in whatever order."""
    clock = ManualClock()
    books = Books(clock)
    open_bookings: list[Booking] = []

    for step, number in steps:
        if step == "book":
            open_bookings.append(books.book(number))
        elif step == "revise" and open_bookings:
            books.revise(open_bookings[number % len(open_bookings)], number % 7)
        elif step == "computed" and open_bookings:
            books.computed(open_bookings[number % len(open_bookings)])
        elif step == "close" and open_bookings:
            books.close(open_bookings.pop(number % len(open_bookings)))
        elif step == "report":
            books.report(Load(running_requests=number % 5, outstanding_prompt_tokens=number))
        elif step in ("accepted", "early"):  # the number of other routers may change, so reports come with and without
            load = Load(waiting_requests=number % 3, outstanding_prompt_tokens=number // 2)
            books.report(load, AcceptedLoad(number % 5, number), is_between_reports=step == "early")
        elif step == "wait":
            clock.advance(number / 250)
        elif step == "forget":
            books.forget_reports()
        assert books.own_tokens == sum(booking.tokens for booking in open_bookings)
        assert books.own_requests == len(open_bookings)
        assert books.outstanding_tokens >= 0
        assert books.running_requests >= books.own_requests
    for booking in open_bookings:
        books.close(booking)
    clock.advance(SETTLING_S)
    books.report(Load())
    assert (books.own_tokens, books.own_requests, books.outstanding_tokens, books.running_requests) == (0, 0, 0, 0)

"""The tries of one call: what counts as an answer, what is awaited and for how long."""

from __future__ import annotations

from random import Random

import pytest

from radixfleet.clock import ManualClock
from radixfleet.errors import Cancelled, DeadlineExceeded, Overloaded, RadixfleetError, Unreachable
from radixfleet.retry import Contact, RetryPolicy, Tries

POLICY = RetryPolicy(retries=2, reconnect_s=20.0)
GONE = Unreachable("gone")


class Caller:
    """A client in time that a test moves."""

    def __init__(self, *, has_answered: bool) -> None:
        self.clock = ManualClock()
        self.contact = Contact(has_answered)

    def call(self) -> Tries:
        return Tries(POLICY, self.contact, self.clock, Random(0))

    def waits_s(self, tries: Tries) -> float:
        """How long a server that stays away is awaited."""
        begun_s = self.clock.now()
        while (delay_s := tries.delay_s(GONE, None)) is not None:
            self.clock.advance(delay_s)
        return self.clock.now() - begun_s


@pytest.mark.parametrize("error", [DeadlineExceeded("no answer"), Cancelled("closed")])
def test_what_the_client_says_itself_is_no_answer(error: RadixfleetError) -> None:
    """A host that swallows packets never answered, however many calls ran out of time on it."""
    caller = Caller(has_answered=False)
    assert caller.call().delay_s(error, None) is None
    assert caller.waits_s(caller.call()) < 1.0


def test_a_refusal_is_an_answer() -> None:
    caller = Caller(has_answered=False)
    tries = caller.call()
    assert tries.delay_s(Overloaded("full"), None) is not None
    assert 20.0 <= caller.waits_s(tries) < 22.0


def test_waiting_for_a_server_leaves_all_tries_for_when_it_is_back() -> None:
    tries = Caller(has_answered=True).call()
    assert all(tries.delay_s(GONE, None) is not None for _ in range(10))
    full = Overloaded("full", retry_after_s=3.0)
    assert [tries.delay_s(full, None) is not None for _ in range(3)] == [True, True, False]


def test_a_server_that_goes_twice_in_one_call_is_awaited_twice() -> None:
    caller = Caller(has_answered=True)
    tries = caller.call()
    tries.delay_s(GONE, None)
    caller.clock.advance(15.0)
    assert tries.delay_s(Overloaded("full"), None) is not None
    assert caller.waits_s(tries) >= 20.0


def test_each_outage_is_awaited_from_the_first_call_that_meets_it() -> None:
    """One of which no call heard the end has nothing to do with the next, a minute later."""
    caller = Caller(has_answered=True)
    caller.call().delay_s(GONE, left_s=0.01)
    caller.clock.advance(60.0)
    assert caller.waits_s(caller.call()) >= 20.0


def test_a_server_that_was_awaited_in_vain_is_not_awaited_again() -> None:
    caller = Caller(has_answered=True)
    assert caller.waits_s(caller.call()) >= 20.0
    assert caller.waits_s(caller.call()) < 1.0

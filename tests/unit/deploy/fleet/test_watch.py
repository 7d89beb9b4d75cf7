"""What a supervisor concludes from the reports of one member."""

from __future__ import annotations

import pytest

from deploy.fleet.watch import Watch
from radixfleet.clock import ManualClock
from radixfleet.membership import MemberReport, Phase


async def never() -> MemberReport:
    raise AssertionError("nobody asks: the test tells what was heard")


@pytest.mark.parametrize("ceased", ["starting", "failed"])
def test_ceasing_to_serve_is_a_failure_until_it_has_served_for_a_minute(ceased: Phase) -> None:
    """A rollout trusts no worker that serves between its crashes."""
    clock = ManualClock()
    watch = Watch("m-0", never, clock, 1.0)
    for phase in ("starting", "serving"):
        watch.heard(MemberReport(phase))
    assert watch.failures == 0
    watch.heard(MemberReport(ceased))
    watch.heard(MemberReport("serving"))
    assert watch.failures == 1
    clock.advance(59.0)
    watch.heard(MemberReport("serving"))
    assert watch.failures == 1
    clock.advance(1.0)
    watch.heard(MemberReport("serving"))
    assert watch.failures == 0


def test_who_had_a_place_and_says_nothing_is_lost_and_else_waits_for_one() -> None:
    clock = ManualClock()
    assert Watch("m-0", never, clock, 1.0).phase() == "pending"
    watch = Watch("m-0", never, clock, 1.0, had_place=True)
    clock.advance(5.0)
    assert (watch.phase(), watch.phase_s) == ("lost", 5.0)
    watch.heard(MemberReport("serving"))
    assert (watch.phase(), watch.failures) == ("serving", 0)


def test_what_a_process_says_that_was_ended_is_not_of_the_next() -> None:
    former = MemberReport("drained", node_id="n1", pids=(7, 8))
    watch = Watch("m-0", never, ManualClock(), 1.0, former=former)
    watch.heard(former)
    assert (watch.phase(), watch.report) == ("lost", None), "should it never end, it is ended again"
    watch.heard(MemberReport("starting", node_id="n1", pids=(9,)))
    assert watch.phase() == "starting"

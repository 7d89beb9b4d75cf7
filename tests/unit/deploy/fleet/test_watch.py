"""What a supervisor concludes from the reports of one member."""

from __future__ import annotations

import pytest

from deploy.fleet.watch import Watch
from radixfleet.clock import ManualClock
from radixfleet.membership import MemberReport, Phase


async def never() -> MemberReport:
    raise NotImplementedError


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

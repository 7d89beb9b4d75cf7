"""One member as its supervisor sees it: asked for a report again and again, and what follows from the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from deploy.fleet.reconcile import Member, SeenPhase
from radixfleet.clock import Clock
from radixfleet.membership import MemberReport

SILENCE_S = 10.0
"""Without an answer for so long, a member is lost."""
_LASTING_S = 60.0
"""A member that has served for so long has recovered from its failures."""


class MemberGone(Exception):
    """There is no such actor, and none will be made by itself."""


class MemberLost(Exception):
    """The actor does not answer now; Ray may be starting it again."""


class Watch:
    """Begins with a member that has not answered. `follow` runs until it is cancelled or the member is gone."""

    def __init__(
        self,
        name: str,
        ask: Callable[[], Awaitable[MemberReport]],
        clock: Clock,
        period_s: float,
        *,
        had_place: bool = False,
        former: MemberReport | None = None,
    ) -> None:
        """`ask` raises MemberGone and MemberLost.

        `had_place`: an earlier supervisor saw it, so until it answers it is lost, and not one that waits for a place.
        `former`: of the process that was ended so that another comes; what that one still says is of no member.
        """
        self.name = name
        self.report: MemberReport | None = None
        """The last one."""
        self.failures = 0
        self.failure = ""
        """Why it last failed; empty once it serves."""
        self.seen = asyncio.Event()
        """Set with the first answer, or when there is certain to be none."""
        self._ask = ask
        self._clock = clock
        self._period_s = period_s
        self._answered_s: float | None = None
        self._has_place = had_place
        self._former = _process(former) if former is not None else None
        self._phase: SeenPhase = "lost" if had_place else "pending"
        self._since_s = clock.now()
        self._lost = False
        self._gone = False

    async def follow(self) -> None:
        """Ask, again and again."""
        while not self._gone:
            try:
                self.heard(await self._ask())
            except MemberGone:
                self._gone = True
            except MemberLost:
                self._lost = True
            self.seen.set()
            self.phase()
            await asyncio.sleep(self._period_s)

    def heard(self, report: MemberReport) -> None:
        """Take a report."""
        self._has_place = True
        if _process(report) == self._former:
            return
        self.report = report
        self._lost = False
        self._answered_s = self._clock.now()
        self.phase()

    def phase(self) -> SeenPhase:
        """Its phase now; keeps account of since when, and of failures."""
        seen = self._seen()
        now_s = self._clock.now()
        if self.report is not None and seen in ("failed", "serving"):
            self.failure = self.report.message if seen == "failed" else ""
        if seen != self._phase:
            self.failures += seen == "failed" or (self._phase == "serving" and seen in ("starting", "lost"))
            self._phase, self._since_s = seen, now_s
        elif seen == "serving" and now_s - self._since_s >= _LASTING_S:
            self.failures = 0
        return seen

    @property
    def phase_s(self) -> float:
        """For how long it has been in its phase."""
        return self._clock.now() - self._since_s

    def _seen(self) -> SeenPhase:
        if self._gone:
            return "gone"
        if self.report is None or self._answered_s is None:
            return "lost" if self._has_place else "pending"
        if self._lost or self._clock.now() - self._answered_s >= SILENCE_S:
            return "lost"
        return self.report.phase

    def member(self, group: str, revision: str, *, busy: bool) -> Member:
        """For `reconcile`. `busy`: it is being ended, so nothing else must be done to it."""
        phase = self.phase()
        running = self.report.running_requests if self.report is not None else 0
        return Member(self.name, group, revision, "draining" if busy else phase, self.phase_s, self.failures, running)


def _process(report: MemberReport) -> tuple[str, tuple[int, ...]]:
    """Which one gave it."""
    return report.node_id, report.pids[:1]

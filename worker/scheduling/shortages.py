"""Episodes in which memory ran short: when one begins and ends, and what the operator should change.

An episode is named by its stage. It begins with the first shortage and ends when the scheduler says that it is over;
shortages within it say nothing new, so that what would be a thousand lines of a log is two.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.memory.advisor import Advice, Stage


class ShortageChange(NamedTuple):
    """An episode began, or ended."""

    stage: Stage
    advice: Advice
    began: bool


class Shortages:
    """Written by the scheduler; the engine's loop logs what changes and reports what is open."""

    def __init__(self) -> None:
        self._open: dict[Stage, Advice] = {}
        self._changes: list[ShortageChange] = []

    @property
    def open(self) -> dict[str, str]:
        """Advice by stage, of the episodes that have not ended."""
        return {stage.value: advice.text for stage, advice in self._open.items()}

    def began(self, stage: Stage, advice: Advice) -> None:
        """Memory ran short. News only if no episode of this stage is open."""
        if stage not in self._open:
            self._open[stage] = advice
            self._changes.append(ShortageChange(stage, advice, began=True))

    def ended(self, *stages: Stage) -> None:
        """There is enough again, as far as anybody can tell."""
        for stage in stages:
            advice = self._open.pop(stage, None)
            if advice is not None:
                self._changes.append(ShortageChange(stage, advice, began=False))

    def take_changes(self) -> list[ShortageChange]:
        """What began and ended since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

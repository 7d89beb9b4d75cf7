"""What the screen shows of the fleet, apart from the fleet: order, selection, page. Frozen; keys make new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from radixfleet.overview import STATES, WorkerRow


class Page(StrEnum):
    """What fills the screen below the fleet."""

    WORKERS = "workers"
    WORKER = "worker"
    HELP = "help"


def _low_last(value: float | None) -> float:
    return -1.0 if value is None else value


SORTS: dict[str, tuple[Callable[[WorkerRow], Any], bool]] = {
    "worker": (lambda row: row.worker, False),
    "state": (lambda row: -STATES.index(row.state), True),
    "requests": (lambda row: (row.running + row.waiting, row.waiting), True),
    "KV": (lambda row: row.kv.used / row.kv.total if row.kv.total else -1.0, True),
    "hit rate": (lambda row: _low_last(row.pace.hit_rate), True),
    "tokens/s": (lambda row: row.pace.output_tokens_per_s, True),
    "TTFT": (lambda row: _low_last(row.pace.ttft_p50_s), True),
    "bubble": (lambda row: _low_last(row.pace.bubble_share), True),
}
"""What the rows may be ordered by: key, and whether the largest comes first."""

_SORT_KEYS = {
    "n": "worker",
    "a": "state",
    "w": "requests",
    "k": "KV",
    "h": "hit rate",
    "t": "tokens/s",
    "f": "TTFT",
    "b": "bubble",
}

KEYS = (
    ("up, down", "select a worker"),
    ("enter", "all about the selected worker; again, or esc: back"),
    ("s, S", "order by the next, the previous column"),
    ("r", "reverse the order"),
    *((key, f"order by {name}") for key, name in _SORT_KEYS.items()),
    ("?", "this help"),
    ("q, ctrl-c", "quit"),
)
"""For the help page."""


@dataclass(frozen=True, slots=True)
class View:
    """See the module."""

    page: Page = Page.WORKERS
    sort: str = "worker"
    reverse: bool = False
    selected: str = ""
    """Name of a worker; one that is gone, or "": the first."""
    is_over: bool = False
    """The user wants to leave."""

    def ordered(self, workers: Sequence[WorkerRow]) -> list[WorkerRow]:
        """The workers in the order of the screen. Equal ones stand by name, whatever the direction."""
        key, largest_first = SORTS[self.sort]
        return sorted(sorted(workers, key=lambda row: row.worker), key=key, reverse=largest_first is not self.reverse)

    def index(self, ordered: Sequence[WorkerRow]) -> int:
        """Where the selected worker stands."""
        return next((index for index, row in enumerate(ordered) if row.worker == self.selected), 0)

    def pressed(self, key: str, workers: Sequence[WorkerRow]) -> View:
        """The view after a key, named as `deploy.top.keys` names it. Unknown ones change nothing."""
        if key in ("q", "ctrl-c"):
            return replace(self, is_over=True)
        if key in ("?",):
            return replace(self, page=Page.WORKERS if self.page is Page.HELP else Page.HELP)
        if key in ("esc", "backspace", "left"):
            return replace(self, page=Page.WORKERS)
        if key in ("up", "down", "home", "end", "page-up", "page-down"):
            return self._moved(key, self.ordered(workers))
        if key in ("enter", "right") and workers:
            ordered = self.ordered(workers)
            page = Page.WORKERS if self.page is Page.WORKER else Page.WORKER
            return replace(self, page=page, selected=ordered[self.index(ordered)].worker)
        return self._sorted(key)

    def _sorted(self, key: str) -> View:
        names = list(SORTS)
        if key in ("s", "S"):
            step = 1 if key == "s" else -1
            return replace(self, sort=names[(names.index(self.sort) + step) % len(names)], reverse=False)
        if key == "r":
            return replace(self, reverse=not self.reverse)
        if key in _SORT_KEYS:
            return replace(self, sort=_SORT_KEYS[key], reverse=False)
        return self

    def _moved(self, key: str, ordered: Sequence[WorkerRow]) -> View:
        if not ordered:
            return self
        steps = {"up": -1, "down": 1, "page-up": -10, "page-down": 10, "home": -len(ordered), "end": len(ordered)}
        index = min(len(ordered) - 1, max(0, self.index(ordered) + steps[key]))
        return replace(self, selected=ordered[index].worker)

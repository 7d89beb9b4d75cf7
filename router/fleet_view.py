"""The workers of one model as a policy sees them: each by itself, and all of them as columns of numbers.

A choice among a thousand workers must not touch each of them in Python, so what a score needs of every worker is kept
in numpy columns beside the views. A worker that changed replaces its row in place; what is summed over all workers is
kept with it, so a choice sums nothing. Sums are exact: the figures are whole numbers, or multiples of 2**-32. The view
of such a worker is looked at when a policy reads it, and the default reads none.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from router.view import NEVER, Figures, WorkerView

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.intp]

STEP_REQUESTS = 32
"""The fixed time of a step, in decodes: so many running requests make it twice as long as of an idle worker."""
BURST_REQUESTS = 8
"""About so many siblings a burst has. A prefill where so many run delays as many as would wait for it elsewhere."""


class Viewed(Protocol):
    """A worker that changed."""

    @property
    def view(self) -> WorkerView:
        """As it is now."""
        ...


class Columns:
    """The same figures of many workers, one place a worker. The arrays are read, never written, outside this module."""

    def __init__(self, slots: IntArray, table: FloatArray) -> None:
        self.slots = slots
        self.count = len(slots)
        self._table = table
        self.queue, self.requests, self.held, self.fill, self.room, self.place = table
        self.queued: float = float(table[0].sum())
        """Prompt tokens outstanding, in all."""
        self.in_flight: float = float(table[1].sum())
        """Requests, in all."""
        self.filled: float = float(table[3].sum())
        """`WorkerView.cache_fill`, in all."""
        self._least_requests: float | None = None
        self._least_room: float | None = None
        self._most_fill: float | None = None
        self._most_place: float | None = None
        self._num_idle: int | None = None
        self._crowding: FloatArray | None = None
        self._changes = False
        """They are changed in place, so they last, and what takes long to find is kept."""
        self._queues: list[float] | None = None
        """`queue`, the shortest first."""

    def __len__(self) -> int:
        return self.count

    @property
    def least_requests(self) -> float:
        """Requests of the worker that has fewest. There must be a worker."""
        if self._least_requests is None:
            self._least_requests = _least_of(self.requests)
        return self._least_requests

    @property
    def least_room(self) -> float:
        """KV tokens that every worker has free, or could free; minus infinity when one serves nobody."""
        if self._least_room is None:
            self._least_room = _least_of(self.room)
        return self._least_room

    @property
    def most_place(self) -> float:
        """Tokens of the longest prompt that may be sent to some worker now (see `router.view.Figures`). There must be a
        worker."""
        if self._most_place is None:
            self._most_place = _most_of(self.place)
        return self._most_place

    @property
    def crowding(self) -> FloatArray:
        """The third power of how many requests, with those that must end first, are beyond the least."""
        if self._crowding is None:
            more = self.held - self.least_requests
            self._crowding = more * more * more
        return self._crowding

    def queue_at(self, rank: int) -> float:
        """The queue of which `rank` others are no longer."""
        if self._queues is not None:
            return self._queues[rank]
        if self._changes:
            self._queues = sorted(self.queue.tolist())
            return self._queues[rank]
        # For one look, as when a worker is out, this takes 3 us of 1,000 workers, and sorting all 65.
        return float(np.partition(self.queue, rank)[rank])

    @property
    def num_idle(self) -> int:
        """Workers with no queue, where a request could run at once, beside fewer than `BURST_REQUESTS` others."""
        if self._num_idle is None:
            idle = (self.queue == 0) & (self.place == inf) & (self.requests < BURST_REQUESTS)
            self._num_idle = int(np.count_nonzero(idle))
        return self._num_idle

    def fill_up_to(self, most: float) -> FloatArray:
        """`fill`, with `most` in place of what is more."""
        if self._most_fill is None:
            self._most_fill = _most_of(self.fill)
        capped: FloatArray = self.fill if self._most_fill <= most else np.minimum(self.fill, most)
        return capped

    def at(self, positions: IntArray) -> Columns:
        """The columns of the workers at `positions` alone."""
        return Columns(self.slots[positions], self._table.take(positions, axis=1))

    def named(self, costs: FloatArray) -> Mapping[int, float]:
        """`costs`, one a worker, as a mapping by slot."""
        return ColumnCosts(self.slots, costs)

    def replace(self, position: int, old: Figures, new: Figures) -> None:
        """Take over the new figures of one worker."""
        self._changes = True
        queue, requests, held, fill, room, place = new
        was_queue, was_requests, _, was_fill, was_room, was_place = old
        if queue != was_queue:
            self.queued += queue - was_queue
            self.queue[position] = queue
            if self._queues is not None:
                del self._queues[bisect_left(self._queues, was_queue)]
                insort(self._queues, queue)
        if fill != was_fill:
            self.filled += fill - was_fill
            self.fill[position] = fill
            self._most_fill = _most(self._most_fill, was_fill, fill)
        if room != was_room or place != was_place:
            self.room[position], self.place[position] = room, place
            self._least_room = _least(self._least_room, was_room, room)
            self._most_place = _most(self._most_place, was_place, place)
        if self._num_idle is not None:
            self._num_idle += _is_idle(new) - _is_idle(old)
        self.in_flight += requests - was_requests
        self.requests[position], self.held[position] = requests, held
        least = self._least_requests
        self._least_requests = _least(least, was_requests, requests)
        if self._least_requests is None or self._least_requests != least:
            self._crowding = None
        elif self._crowding is not None:
            more = held - self._least_requests
            self._crowding[position] = more * more * more


class FleetView(Sequence[WorkerView]):
    """Workers, in the order in which they were given."""

    def __init__(self, workers: Iterable[WorkerView]) -> None:
        self._views = list(workers)
        self._unseen: dict[int, Viewed] = {}
        """Workers by position whose views are others by now."""
        self._figures = [view.figures for view in self._views]
        self._serving: Columns | None = None
        self._served_at: dict[int, int] | None = None
        """Where among `_serving` a worker is, by position; None: not worked out, for none of them has changed."""
        slots = np.array([view.slot for view in self._views], dtype=np.intp)
        rows = np.array(self._figures, dtype=np.float64).reshape(len(self._views), 6)
        self.columns = Columns(slots, np.ascontiguousarray(rows.T))

    @staticmethod
    def of(workers: Sequence[WorkerView]) -> FleetView:
        """A view of `workers`: they themselves when they are one already."""
        return workers if isinstance(workers, FleetView) else FleetView(workers)

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._seen())

    @overload
    def __getitem__(self, index: int) -> WorkerView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkerView]: ...
    def __getitem__(self, index: int | slice) -> WorkerView | Sequence[WorkerView]:
        return self._seen()[index]

    def changed(self, position: int, worker: Viewed, figures: Figures) -> None:
        """The worker at `position` has these figures now; its view is looked at when it is read, in the same turn."""
        self._unseen[position] = worker
        old, self._figures[position] = self._figures[position], figures
        self.columns.replace(position, old, figures)
        if (old[4] == NEVER) != (figures[4] == NEVER):
            self._serving = None
        elif self._serving is not None and self._serving is not self.columns and figures[4] != NEVER:
            if self._served_at is None:
                serving = np.flatnonzero(self.columns.room > NEVER).tolist()
                self._served_at = {position: place for place, position in enumerate(serving)}
            self._serving.replace(self._served_at[position], old, figures)

    def only(self, positions: IntArray) -> FleetView:
        """The view of some of the workers, as they are now: to be read in this turn of the event loop."""
        return _Part(self, positions)

    @property
    def serving(self) -> Columns:
        """The columns of those that `router.view.eligible` lets through: all, mostly. While some are out these last as
        the others do."""
        if self._serving is None:
            positions = np.flatnonzero(self.columns.room > NEVER)
            self._served_at = None
            self._serving = self.columns if len(positions) == len(self.columns) else self.columns.at(positions)
        return self._serving

    def is_saturated(self, prompt_tokens: int) -> bool:
        """Whether some worker serves, and none of those has a place for a prompt of so many tokens now."""
        columns = self.serving
        return bool(columns.count) and columns.most_place < prompt_tokens

    def _seen(self) -> list[WorkerView]:
        if self._unseen:
            for position, worker in self._unseen.items():
                self._views[position] = worker.view
            self._unseen.clear()
        return self._views


class _Part(FleetView):
    """Some workers of another view, by numbers alone until somebody reads them one by one. It follows no change."""

    def __init__(self, whole: FleetView, positions: IntArray) -> None:
        self._whole = whole
        self._positions = positions
        self._serving = None
        self.columns = whole.columns.at(positions)

    def _seen(self) -> list[WorkerView]:
        views = self._whole._seen()
        return [views[position] for position in self._positions.tolist()]


@dataclass(slots=True, eq=False)
class ColumnCosts(Mapping[int, float]):
    """Costs by slot, made of columns: nobody but an explanation looks at them one by one. Never written."""

    slots: IntArray
    costs: FloatArray

    def __getitem__(self, slot: int) -> float:
        found = np.flatnonzero(self.slots == slot)
        if not len(found):
            raise KeyError(slot)
        return float(self.costs[found[0]])

    def __iter__(self) -> Iterator[int]:
        return iter(self.slots.tolist())

    def __len__(self) -> int:
        return len(self.slots)


def _is_idle(figures: Figures) -> bool:
    """Whether a worker with these figures is idle: see `Columns.num_idle`."""
    return not figures[0] and figures[5] == inf and figures[1] < BURST_REQUESTS


def _least_of(column: FloatArray) -> float:
    """The least entry: by `argmin`, which takes a fifth of the time that `min` takes."""
    return column.item(column.argmin())


def _most_of(column: FloatArray) -> float:
    return column.item(column.argmax())


def _most(most: float | None, old: float, new: float) -> float | None:
    """What `_least` is for the least, for the most."""
    least = _least(None if most is None else -most, -old, -new)
    return None if least is None else -least


def _least(least: float | None, old: float, new: float) -> float | None:
    """The least of many figures after one of them went from `old` to `new`; None: only a look at all can tell."""
    if least is None or new <= least:
        return None if least is None else new
    return None if old == least else least

"""Numbers of the requests that hold a row, as columns: what a step must know of each, read for all of them at once.

A step in which 256 requests decode is a few array operations and not 256 turns of a loop. `Request` shows the entries
of its own row under the same names; what is of no use to a whole batch stays an attribute of the request.

A row's entries are its request's from admission until its memory is released. They begin at zero.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.core.step import StepPlan

Column = npt.NDArray[np.int64]
RowIndex = npt.NDArray[np.int64]
"""Rows, in the order of their requests' admission."""


class Rows:
    """The columns, int64 [max_rows] each. Written by the scheduler and its parts."""

    def __init__(self, max_rows: int) -> None:
        self._all = np.zeros((len(COLUMNS), max_rows), dtype=np.int64)
        columns = dict(zip(COLUMNS, self._all, strict=True))
        self.uid: Column = columns["uid"]
        self.allocated: Column = columns["allocated"]
        """Positions that have a slot."""
        self.own_pages: Column = columns["own_pages"]
        """Pages that are the request's and not the cache's."""
        self.filled: Column = columns["filled"]
        """Tokens of `fill_ids`."""
        self.final: Column = columns["final"]
        """Positions that it takes at most."""
        self.planned: Column = columns["planned"]
        self.settled: Column = columns["settled"]
        """The two frontiers: see `request`."""
        self.in_flight: Column = columns["in_flight"]
        self.samples_in_flight: Column = columns["samples_in_flight"]
        self.to_sample: Column = columns["to_sample"]
        """Tokens that it may still make, beyond those that are settled or in flight."""
        self.is_decoding: Column = columns["is_decoding"]
        """1 in DECODE, else 0."""
        self.stale_steps: Column = columns["stale_steps"]
        self.restarts: Column = columns["restarts"]
        self.tries_alone: Column = columns["tries_alone"]
        self.last_step: Column = columns["last_step"]
        """As the attributes of `Request`."""

    def entries(self, row: int) -> memoryview:
        """A row's entries in the order of `COLUMNS`, to read and to write one by one, faster than by numpy."""
        return self._all[:, row].data

    def clear(self, row: int) -> None:
        """Set all entries of a row to zero: it belongs to no request."""
        self._all[:, row] = 0

    def launched(self, plan: StepPlan) -> None:
        """Book a step as launched: it computes the next tokens of each of its rows."""
        # As wide as the columns: numpy would convert them again for each.
        rows, samples = plan.rows.astype(np.int64), plan.samples.astype(np.int64)
        self.planned[rows] += plan.lengths
        self.in_flight[rows] += 1
        self.samples_in_flight[rows] += samples
        self.to_sample[rows] -= samples
        self.last_step[rows] = plan.step

    def computed(self, decodes: RowIndex, starts: npt.NDArray[np.integer]) -> None:
        """Book decodes as computed: positions `starts` have their KV, and what was sampled from them is known."""
        self.in_flight[decodes] -= 1
        self.samples_in_flight[decodes] -= 1
        self.tries_alone[decodes] = 0
        self.settled[decodes] = starts + 1


COLUMNS = (
    "uid",
    "allocated",
    "own_pages",
    "filled",
    "final",
    "planned",
    "settled",
    "in_flight",
    "samples_in_flight",
    "to_sample",
    "is_decoding",
    "stale_steps",
    "restarts",
    "tries_alone",
    "last_step",
)

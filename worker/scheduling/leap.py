"""Many decode steps at once, for simulations in virtual time: the same state as that many times plan and commit.

Between two events (a request comes, ends, or finds no page) an engine only decodes: every running request computes
one token a step, nobody is admitted, and nothing is decided but where the next pages come from. `steps_ahead` says
how long that is sure to last, and `leap` does it: the frontiers and the tokens at once, and the pages one by one in
the order in which the steps would have asked for them, because what is evicted for them depends on that order.

Pure. Used by `Scheduler` alone, between steps: no step may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from worker.scheduling.holdings import Holdings
from worker.scheduling.request import Request
from worker.scheduling.running import Running

TokensAhead = Callable[[Request, int], Sequence[int]]
"""The next `int` tokens that a request is going to generate."""


def steps_ahead(running: Running, holdings: Holdings, *, may_admit: bool) -> int:
    """Steps that are sure to be nothing but decodes, up to the one in which the first request ends by length.

    0 where a stop token may end a request at any step.

    `may_admit`: a request waits, and there is a row for it; what a step then does is not foreseen.
    """
    rows, columns = running.rows, holdings.rows
    if may_admit or not len(rows) or not columns.is_decoding[rows].all():
        return 0
    if any(request.submit.stop_token_ids for request in running):
        return 0
    steps = int(columns.to_sample[rows].min())
    available = holdings.available_pages
    while steps > 0 and _most_pages(len(rows), steps, holdings) > available:
        steps //= 2
    return steps


def leap(running: Running, holdings: Holdings, steps: int, tokens_ahead: TokensAhead) -> None:
    """Decode `steps` steps, at most `steps_ahead`."""
    rows, columns, page_size = running.rows, holdings.rows, holdings.page_size
    room = columns.allocated[rows] - columns.planned[rows]
    needs = sorted(
        (step, place) for place, first in enumerate(room.tolist()) for step in range(first, steps, page_size)
    )
    for _, needy in groupby(needs, key=lambda need: need[0]):
        granted = holdings.grow(rows[[place for _, place in needy]])
        assert granted, "steps_ahead counted the pages"
    for request in running:
        request.outputs.extend(tokens_ahead(request, steps))
    columns.planned[rows] += steps
    columns.settled[rows] = columns.planned[rows]
    columns.to_sample[rows] -= steps


def _most_pages(num_running: int, steps: int, holdings: Holdings) -> int:
    """Pages for `steps` decodes of each request, at most: as if each of them needed one at once."""
    return num_running * -(-steps // holdings.page_size)

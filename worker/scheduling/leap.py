"""Many decode steps at once, for simulations in virtual time: the same state as that many times plan and commit.

Between two events (a request comes, ends, or finds no page) an engine only decodes: every running request computes
one token a step, nobody is admitted, and nothing is decided but where the next pages come from. `steps_ahead` says
how long that is sure to last, and `leap` does it: the frontiers and the tokens at once, and the pages one by one in
the order in which the steps would have asked for them, because what is evicted for them depends on that order.

Pure. Used by `Scheduler` alone, between steps: no step may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby

from worker.scheduling.holdings import Holdings
from worker.scheduling.request import Request, State

TokensAhead = Callable[[Request, int], Sequence[int]]
"""The next `int` tokens that a request is going to generate."""


def steps_ahead(running: Collection[Request], holdings: Holdings, *, may_admit: bool) -> int:
    """Steps that are sure to be nothing but decodes, up to the one in which the first request ends by length.

    0 where a stop token may end a request at any step.

    `may_admit`: a request waits, and there is a row for it; what a step then does is not foreseen.
    """
    if may_admit or not running or not all(_decodes_on(request) for request in running):
        return 0
    steps = min([request.submit.max_new_tokens - len(request.outputs) for request in running])
    available = holdings.available_pages
    while steps > 0 and _most_pages(running, steps, holdings) > available:
        steps //= 2
    return steps


def leap(running: Collection[Request], holdings: Holdings, steps: int, tokens_ahead: TokensAhead) -> None:
    """Decode `steps` steps, at most `steps_ahead`."""
    page_size = holdings.page_size
    needs = sorted(
        (step, place, request)
        for place, request in enumerate(running)
        for step in range(request.held.allocated - request.planned, steps, page_size)
    )
    for _, needy in groupby(needs, key=lambda need: need[0]):
        granted = holdings.grow([request.held for _, _, request in needy])
        assert granted, "steps_ahead counted the pages"
    for request in running:
        request.outputs.extend(tokens_ahead(request, steps))
        request.planned += steps
        request.settled = request.planned


def _decodes_on(request: Request) -> bool:
    return request.state is State.DECODE and not request.submit.stop_token_ids


def _most_pages(running: Collection[Request], steps: int, holdings: Holdings) -> int:
    """Pages for `steps` decodes of each request, at most: as if each of them needed one at once."""
    return len(running) * -(-steps // holdings.page_size)

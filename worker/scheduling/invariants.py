"""The books of the scheduler must balance, at every moment between two of its calls.

pages       free + evictable + protected + requests' own = total, and no page is in two of these
rows        each row has one request, and each request with a row is running or leaving
frontiers   cached <= settled <= planned <= allocated, and what a row names is the cache's (locked) or its request's
in flight   each request counts exactly the launched steps with it, and its row still names the slots that they write
states      each request stands where its state says
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from worker.memory.portions import Portions
from worker.scheduling.assembly import Launched
from worker.scheduling.holdings import Holdings
from worker.scheduling.request import Request, State


def checks(
    holdings: Holdings,
    waiting: list[Request],
    running: list[Request],
    leaving: list[Request],
    launched: list[Launched],
) -> Iterator[None]:
    """Verify all of the above, in portions between which nothing may change. O(pages + positions held).

    Raises AssertionError; changes nothing.
    """
    holders = running + leaving
    yield from _check_pages(holdings, holders)
    _check_rows(holdings, holders)
    for request in holders:
        _check_frontiers(holdings, request)
    _check_in_flight(holdings, holders, launched)
    _check_states(waiting, running, leaving)


def _check_pages(holdings: Holdings, holders: list[Request]) -> Iterator[None]:
    portions = Portions()
    yield from holdings.allocator.checks(portions)
    in_tree = yield from holdings.cache.checks(portions)
    own = [holdings.own_pages(request.held) for request in holders]
    assert sum(map(len, own)) == sum(holdings.num_own_pages(request.held) for request in holders)
    taken = np.concatenate([np.empty(0, dtype=np.int32), *own])
    assert len(np.unique(taken)) == len(taken), "a page has two owners"
    assert not in_tree[taken].any(), "a page has two owners"
    assert not holdings.allocator.is_free(taken).any(), "a free page has an owner"
    free, total = holdings.allocator.free_pages, holdings.allocator.total_pages
    num_taken = holdings.cache.total_pages + len(taken)
    assert free + num_taken == total, f"{free} free pages and {num_taken} taken are not {total}"


def _check_rows(holdings: Holdings, holders: list[Request]) -> None:
    rows = [request.held.row for request in holders]
    assert len(set(rows)) == len(rows), "a row has two requests"
    assert holdings.table.free_rows + len(rows) == holdings.table.max_rows, "a row is lost"


def _check_frontiers(holdings: Holdings, request: Request) -> None:
    held, name = request.held, f"request {request.uid}"
    assert 0 <= held.matched <= request.settled <= request.planned <= held.allocated, f"{name}: frontiers out of order"
    assert held.allocated % holdings.page_size == 0
    assert holdings.num_own_pages(held) == len(holdings.own_pages(held)), f"{name}: its own pages are miscounted"
    columns = held.rows
    assert columns.uid[held.row] == request.uid, f"{name}: its row is another's"
    assert columns.filled[held.row] == len(request.fill_ids), f"{name}: what is to be computed is counted wrongly"
    assert columns.final[held.row] == request.final_tokens, f"{name}: its row is another's"
    assert held.matched <= held.handle.length <= max(request.settled, held.matched), f"{name}: unsettled KV is cached"
    row_pages = holdings.table.pages_between(held.row, 0, held.allocated // holdings.page_size)
    locked = []
    node = held.handle.node
    while node.parent is not None:
        assert node.locks > 0, f"{name}: its prefix is not locked"
        locked.append(node.pages)
        node = node.parent
    known = np.concatenate([*locked, holdings.own_pages(held)])
    assert np.isin(row_pages, known).all(), f"{name}: its row names a page that is neither its own nor locked for it"


def _check_in_flight(holdings: Holdings, holders: list[Request], launched: list[Launched]) -> None:
    steps: Counter[Request] = Counter()
    samples: Counter[Request] = Counter()
    for step in launched:
        offset = 0
        for piece in step.pieces:
            steps[piece.request] += 1
            samples[piece.request] += piece.samples
            slots = step.slots[offset : offset + piece.length]
            offset += piece.length
            named = holdings.table.slots(piece.request.held.row, piece.start, piece.start + piece.length)
            assert np.array_equal(slots, named), f"request {piece.request.uid}: its row changed under a launched step"
    assert steps.keys() <= set(holders), "a launched step has a request that holds nothing"
    for request in holders:
        assert request.in_flight == steps[request], f"request {request.uid}: {request.in_flight} steps in flight"
        assert request.samples_in_flight == samples[request], f"request {request.uid}: samples in flight"
        assert 0 <= request.stale_steps <= request.in_flight, f"request {request.uid}: stale steps"


def _check_states(waiting: list[Request], running: list[Request], leaving: list[Request]) -> None:
    for request in waiting:
        assert request.state is State.WAITING
        assert request.holding is None
        assert not request.in_flight
        assert not request.samples_in_flight
        assert request.planned == request.settled == 0
        assert not request.restarts
    for request in running:
        made = len(request.outputs) + request.samples_in_flight
        assert request.to_sample == request.submit.max_new_tokens - made, f"request {request.uid}: tokens to come"
        assert request.held.rows.is_decoding[request.held.row] == (request.state is State.DECODE)
        filled = request.planned >= len(request.fill_ids)
        assert request.state is (State.DECODE if filled else State.PREFILL), f"request {request.uid}: {request.state}"
        assert not request.stale_steps or request.restarts, f"request {request.uid}: stale steps, and no new start"
    for request in leaving:
        assert request.state in (State.RETRACTED, State.FINISHED)
        assert request.in_flight > 0, f"request {request.uid} should have retired"

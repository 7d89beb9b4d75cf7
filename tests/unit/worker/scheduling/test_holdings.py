"""Taking and giving back: rows, locks and pages of one request."""

from __future__ import annotations

import numpy as np
import pytest

from worker.memory.page_allocator import PageAllocator
from worker.memory.radix_cache import RadixCache
from worker.memory.req_to_token import ReqToTokenPool
from worker.scheduling.holdings import Holding, Holdings

TOKENS = np.arange(40, dtype=np.int32)


def make_holdings(num_pages: int = 20, max_rows: int = 3) -> Holdings:
    allocator = PageAllocator(num_pages + 1, 4)
    return Holdings(allocator, ReqToTokenPool(max_rows, 80, 4), RadixCache(allocator))


def open_for(holdings: Holdings, tokens: np.ndarray, num_tokens: int | None = None) -> Holding | None:
    match = holdings.cache.match(("m",), tokens, limit=len(tokens) - 1)
    handle = holdings.cache.lock(match)
    holding = holdings.open(handle, match.pages, num_tokens or len(tokens))
    if holding is None:
        holdings.cache.unlock(handle)
    holdings.provide()
    return holding


def opened(holdings: Holdings, tokens: np.ndarray) -> Holding:
    holding = open_for(holdings, tokens)
    assert holding is not None
    return holding


def grow(holdings: Holdings, *grown: Holding) -> bool:
    return holdings.grow(np.array([holding.row for holding in grown]))


def test_a_prompt_gets_all_its_pages() -> None:
    holdings = make_holdings()
    holding = opened(holdings, TOKENS[:10])
    assert (holding.matched, holding.allocated) == (0, 12)
    assert holdings.num_own_pages(holding) == 3
    slots = holdings.table.slots(holding.row, 0, 12)
    assert len(set(slots.tolist())) == 12
    assert slots.min() >= 4, "the padding sink is nobody's"


def test_what_is_kept_is_found_and_no_longer_own() -> None:
    holdings = make_holdings()
    first = opened(holdings, TOKENS[:10])
    holdings.keep(first, TOKENS[:10])
    assert holdings.num_own_pages(first) == 1
    second = opened(holdings, TOKENS[:14])
    assert (second.matched, second.allocated, holdings.num_own_pages(second)) == (8, 16, 2)
    shared = holdings.table.slots(first.row, 0, 8)
    assert holdings.table.slots(second.row, 0, 8).tolist() == shared.tolist()


def test_a_second_copy_stays_its_own_until_release() -> None:
    holdings = make_holdings()
    first, second = opened(holdings, TOKENS[:12]), opened(holdings, TOKENS[:12])
    row_before = holdings.table.slots(second.row, 0, 12).tolist()
    holdings.keep(first, TOKENS[:8])
    holdings.keep(second, TOKENS[:12])
    assert holdings.num_own_pages(second) == 2
    assert sorted(holdings.own_pages(second).tolist()) == sorted({slot // 4 for slot in row_before[:8]})
    assert holdings.table.slots(second.row, 0, 12).tolist() == row_before, "what a runner was told does not change"
    holdings.release(second)
    holdings.release(first)
    assert holdings.used_pages == 0
    assert holdings.cache.total_pages == 3


def test_copies_that_nobody_else_holds_are_exchanged() -> None:
    """The cache has the request's pages from then on, and its row is as before: runners know it."""
    holdings = make_holdings()
    first, second = opened(holdings, TOKENS[:14]), opened(holdings, TOKENS[:14])
    row_before = holdings.table.slots(second.row, 0, 14).tolist()
    holdings.keep(first, TOKENS[:12])
    holdings.keep(second, TOKENS[:12])
    holdings.exchange_duplicates(second)
    assert holdings.num_own_pages(second) == 4, "the first reads the cache's"
    holdings.release(first)
    assert holdings.used_pages == 7
    holdings.exchange_duplicates(second)
    assert (holdings.used_pages, holdings.num_own_pages(second), len(holdings.own_pages(second))) == (4, 1, 1)
    assert holdings.table.slots(second.row, 0, 14).tolist() == row_before
    assert holdings.cache.match(("m",), TOKENS[:12]).pages.tolist() == [slot // 4 for slot in row_before[:12:4]]
    holdings.cache.check()
    holdings.release(second)
    assert holdings.used_pages == 0


def test_growing_gives_each_a_page_or_nobody() -> None:
    """Behaviour 12."""
    holdings = make_holdings(num_pages=7)
    first, second = opened(holdings, TOKENS[:12]), opened(holdings, TOKENS[20:28])
    assert grow(holdings, first)
    before = (first.allocated, second.allocated, holdings.allocator.free_pages)
    assert before == (16, 8, 1)
    assert not grow(holdings, first, second)
    assert (first.allocated, second.allocated, holdings.allocator.free_pages) == before
    assert grow(holdings, second)
    assert len(set(holdings.table.slots(second.row, 0, 12).tolist())) == 12


def test_growing_evicts_what_nobody_uses() -> None:
    holdings = make_holdings(num_pages=8)
    gone = opened(holdings, TOKENS[:16])
    holdings.keep(gone, TOKENS[:16])
    holdings.release(gone)
    holding = opened(holdings, TOKENS[20:36])
    assert (holdings.allocator.free_pages, holdings.available_pages) == (0, 4)
    for _ in range(3):
        assert grow(holdings, holding)
    assert holdings.cache.total_pages == 1
    assert holdings.available_pages == 1


@pytest.mark.parametrize(("num_pages", "max_rows"), [(20, 1), (6, 3)])
def test_opening_takes_nothing_when_a_row_or_a_page_is_lacking(num_pages: int, max_rows: int) -> None:
    """Behaviour 12."""
    holdings = make_holdings(num_pages, max_rows)
    first = opened(holdings, TOKENS[:12])
    holdings.keep(first, TOKENS[:12])
    before = (holdings.table.free_rows, holdings.used_pages, holdings.cache.protected_pages)
    assert open_for(holdings, np.append(TOKENS[:12], TOKENS[:14])) is None
    assert (holdings.table.free_rows, holdings.used_pages, holdings.cache.protected_pages) == before
    holdings.release(first)
    assert holdings.used_pages == 0


def test_pages_are_promised_and_then_taken_for_all_at_once() -> None:
    holdings = make_holdings(num_pages=8)
    known = opened(holdings, TOKENS[:12])
    holdings.keep(known, TOKENS[:12])
    holdings.release(known)
    handles = [holdings.cache.lock(holdings.cache.match(("m",), TOKENS[:4])) for _ in range(3)]
    first = holdings.open(handles[0], handles[0].node.pages, 16)
    assert first is not None
    assert (holdings.available_pages, holdings.allocator.free_pages) == (4, 5)
    assert holdings.open(handles[1], handles[1].node.pages, 24) is None, "one page too many"
    second = holdings.open(handles[1], handles[1].node.pages, 20)
    assert second is not None
    assert (holdings.available_pages, holdings.used_pages, holdings.cache.total_pages) == (0, 8, 3)
    holdings.provide()
    assert (holdings.available_pages, holdings.used_pages, holdings.cache.total_pages) == (0, 8, 1)
    assert holdings.table.slots(first.row, 0, 4).tolist() == holdings.table.slots(second.row, 0, 4).tolist()
    taken = [*holdings.own_pages(first).tolist(), *holdings.own_pages(second).tolist()]
    assert len(set(taken)) == len(taken) == 7
    holdings.cache.unlock(handles[2])
    holdings.release(first)
    holdings.release(second)
    assert holdings.used_pages == 0


def test_release_gives_back_all() -> None:
    holdings = make_holdings()
    holding = opened(holdings, TOKENS[:10])
    holdings.keep(holding, TOKENS[:6])
    holdings.release(holding)
    assert holdings.used_pages == 0
    assert holdings.allocator.free_pages == 19
    assert holdings.table.free_rows == 3
    assert holdings.cache.match(("m",), TOKENS).length == 4

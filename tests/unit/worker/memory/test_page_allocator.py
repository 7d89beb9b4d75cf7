from __future__ import annotations

import numpy as np
import pytest

from tests.support.cached_sequence import int32
from worker.memory.page_allocator import PageAllocator, PageError, pages_for, slots_of


def test_hands_out_every_page_but_the_padding_sink_once() -> None:
    allocator = PageAllocator(num_pages=9, page_size=4)
    pages = allocator.allocate(8)
    assert pages is not None
    assert pages.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pages.dtype == np.int32
    assert allocator.free_pages == 0
    assert allocator.total_pages == 8


def test_allocates_all_or_nothing() -> None:
    allocator = PageAllocator(num_pages=4, page_size=1)
    assert allocator.allocate(4) is None
    assert allocator.free_pages == 3
    assert allocator.allocate(0) is not None
    with pytest.raises(PageError):
        allocator.allocate(-1)
    assert allocator.free_pages == 3


def test_pages_freed_last_are_used_first() -> None:
    allocator = PageAllocator(num_pages=10, page_size=1)
    pages = allocator.allocate(6)
    assert pages is not None
    allocator.free(pages[[4, 1]])
    again = allocator.allocate(3)
    assert again is not None
    assert again.tolist() == [5, 2, 7]


@pytest.mark.parametrize(
    ("pages", "complaint"),
    [
        ([0], "not all in"),
        ([-1], "not all in"),
        ([3, 6], "not all in"),
        ([1, 5], "page 5 is freed twice"),
        ([1, 2, 1], "page 1 is freed twice in one call"),
    ],
)
def test_refuses_wrong_pages_before_the_free_list_is_touched(pages: list[int], complaint: str) -> None:
    """Behaviour 13: allocator bounds are checked before the free list is touched."""
    allocator = PageAllocator(num_pages=6, page_size=1)
    taken = allocator.allocate(4)
    assert taken is not None
    with pytest.raises(PageError, match=complaint):
        allocator.free(int32(pages))
    allocator.check()
    assert allocator.free_pages == 1
    assert not allocator.is_free(taken).any()
    allocator.free(taken)
    assert allocator.free_pages == 5


def test_check_finds_broken_books() -> None:
    allocator = PageAllocator(num_pages=6, page_size=1)
    allocator._is_free[3] = False
    with pytest.raises(PageError, match="disagree"):
        allocator.check()
    allocator = PageAllocator(num_pages=6, page_size=1)
    allocator._stack[0] = 0
    allocator._is_free[[0, 5]] = [True, False]
    with pytest.raises(PageError, match="padding"):
        allocator.check()


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (5, 0)])
def test_refuses_a_pool_without_room(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="two pages"):
        PageAllocator(num_pages, page_size)


def test_pages_have_consecutive_slots() -> None:
    slots = slots_of(int32([3, 1]), page_size=4)
    assert slots.tolist() == [12, 13, 14, 15, 4, 5, 6, 7]
    assert slots.dtype == np.int32
    assert slots_of(int32([]), page_size=4).tolist() == []
    assert [pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cached_sequence import int32
from worker.memory.page_allocator import PageError
from worker.memory.req_to_token import ReqToTokenPool


def make_pool(max_rows: int = 2, max_context: int = 16) -> ReqToTokenPool:
    return ReqToTokenPool(max_rows, max_context, page_size=4)


def test_rows_are_taken_once_and_come_back() -> None:
    pool = make_pool()
    first, second = pool.take_row(), pool.take_row()
    assert {first, second} == {0, 1}
    assert pool.take_row() is None
    assert pool.free_rows == 0
    assert first is not None
    pool.release_row(first)
    assert pool.take_row() == first


def test_pages_are_written_and_slots_are_read() -> None:
    pool = make_pool()
    row = pool.take_row()
    assert row is not None
    pool.write(row, 0, int32([5, 2]))
    pool.write(row, 2, int32([9]))
    assert pool.pages_between(row, 1, 3).tolist() == [2, 9]
    assert pool.slots(row, 0, 12).tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 36, 37, 38, 39]
    assert pool.slots(row, 3, 9).tolist() == [23, 8, 9, 10, 11, 36]
    assert pool.slots(row, 5, 6).tolist() == [9]
    assert pool.slots(row, 5, 5).tolist() == []
    assert pool.pages.dtype == pool.slots(row, 0, 3).dtype == np.int32
    pool.write(row, 4, int32([]))


def test_one_slot_each_of_many_rows() -> None:
    pool = make_pool()
    for pages in ([5, 2], [7, 3]):
        row = pool.take_row()
        assert row is not None
        pool.write(row, 0, int32(pages))
    slots = pool.slots_at(np.array([1, 0, 1]), np.array([0, 6, 7]))
    assert slots.tolist() == [28, 10, 15]
    assert slots.dtype == np.int32
    assert pool.slots_at(np.array([], np.int64), np.array([], np.int64)).tolist() == []


def test_a_context_that_ends_within_a_page_has_that_page() -> None:
    pool = make_pool(max_context=6)
    row = pool.take_row()
    assert row == 0
    pool.write(row, 0, int32([5, 2]))
    assert pool.slots(row, 4, 6).tolist() == [8, 9]


@pytest.mark.parametrize("row", [-1, 1, 2])
def test_a_row_that_is_not_taken_is_refused(row: int) -> None:
    pool = make_pool()
    assert pool.take_row() == 0
    with pytest.raises(PageError, match="not taken"):
        pool.release_row(row)
    with pytest.raises(PageError, match="not taken"):
        pool.write(row, 0, int32([1]))
    with pytest.raises(PageError, match="not taken"):
        pool.slots(row, 0, 1)
    assert pool.free_rows == 1


def test_a_row_is_not_released_twice() -> None:
    pool = make_pool(max_rows=1)
    row = pool.take_row()
    assert row == 0
    pool.release_row(row)
    with pytest.raises(PageError, match="not taken"):
        pool.release_row(row)


def test_positions_outside_the_context_are_refused() -> None:
    pool = make_pool(max_rows=1)
    row = pool.take_row()
    assert row == 0
    with pytest.raises(PageError, match="outside a context of 4 pages"):
        pool.write(row, 3, int32([1, 2]))
    with pytest.raises(PageError, match="outside"):
        pool.slots(row, -1, 2)
    with pytest.raises(PageError, match="outside"):
        pool.slots(row, 0, 17)


def test_many_rows_are_written_at_once() -> None:
    """Or none."""
    pool = make_pool(max_rows=3)
    rows = np.array([pool.take_row(), pool.take_row()])
    pool.write_each(np.array([], np.int64), np.array([], np.int64), int32([]))
    pool.write_each(rows, np.array([0, 3]), int32([5, 6]))
    assert pool.pages_between(rows[0], 0, 1).tolist() == [5]
    assert pool.pages_between(rows[1], 3, 4).tolist() == [6]
    with pytest.raises(PageError, match="outside a context"):
        pool.write_each(rows, np.array([0, 4]), int32([1, 1]))
    with pytest.raises(PageError, match="not taken"):
        pool.write_each(np.array([2]), np.array([0]), int32([1]))
    assert pool.pages_between(rows[0], 0, 1).tolist() == [5]

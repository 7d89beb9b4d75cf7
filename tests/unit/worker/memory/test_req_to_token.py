from __future__ import annotations

import numpy as np
import pytest

from tests.support.cached_sequence import int32
from worker.memory.page_allocator import PageError
from worker.memory.req_to_token import ReqToTokenPool


def test_rows_are_taken_once_and_come_back() -> None:
    pool = ReqToTokenPool(max_rows=2, max_context=8)
    first, second = pool.take_row(), pool.take_row()
    assert {first, second} == {0, 1}
    assert pool.take_row() is None
    assert pool.free_rows == 0
    assert first is not None
    pool.release_row(first)
    assert pool.take_row() == first


def test_positions_are_written_and_read() -> None:
    pool = ReqToTokenPool(max_rows=2, max_context=8)
    row = pool.take_row()
    assert row is not None
    pool.write(row, 0, int32([5, 6, 7]))
    pool.write(row, 3, int32([9]))
    assert pool.slots(row, 1, 4).tolist() == [6, 7, 9]
    assert pool.table[row, :4].tolist() == [5, 6, 7, 9]
    assert pool.table.dtype == np.int32
    pool.write(row, 8, int32([]))


@pytest.mark.parametrize("row", [-1, 1, 2])
def test_a_row_that_is_not_taken_is_refused(row: int) -> None:
    pool = ReqToTokenPool(max_rows=2, max_context=8)
    assert pool.take_row() == 0
    with pytest.raises(PageError, match="not taken"):
        pool.release_row(row)
    with pytest.raises(PageError, match="not taken"):
        pool.write(row, 0, int32([1]))
    with pytest.raises(PageError, match="not taken"):
        pool.slots(row, 0, 1)
    assert pool.free_rows == 1


def test_a_row_is_not_released_twice() -> None:
    pool = ReqToTokenPool(max_rows=1, max_context=8)
    row = pool.take_row()
    assert row == 0
    pool.release_row(row)
    with pytest.raises(PageError, match="not taken"):
        pool.release_row(row)


def test_positions_outside_the_context_are_refused() -> None:
    pool = ReqToTokenPool(max_rows=1, max_context=4)
    row = pool.take_row()
    assert row == 0
    with pytest.raises(PageError, match="outside the context of 4"):
        pool.write(row, 3, int32([1, 2]))
    with pytest.raises(PageError, match="outside"):
        pool.slots(row, -1, 2)


def test_many_rows_are_written_at_once() -> None:
    """Or none."""
    pool = ReqToTokenPool(max_rows=3, max_context=8)
    rows = np.array([pool.take_row(), pool.take_row()])
    pool.write_each(np.array([], np.int64), np.array([], np.int64), np.zeros((0, 2), np.int32))
    pool.write_each(rows, np.array([0, 6]), np.array([[5, 6], [7, 8]], np.int32))
    assert pool.slots(rows[0], 0, 2).tolist() == [5, 6]
    assert pool.slots(rows[1], 6, 8).tolist() == [7, 8]
    with pytest.raises(PageError, match="outside the context"):
        pool.write_each(rows, np.array([0, 7]), np.zeros((2, 2), np.int32))
    with pytest.raises(PageError, match="not taken"):
        pool.write_each(np.array([2]), np.array([0]), np.zeros((1, 2), np.int32))

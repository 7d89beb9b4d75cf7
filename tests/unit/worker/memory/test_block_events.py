from __future__ import annotations

import numpy as np

from radixfleet.types import HashArray
from worker.memory.block_events import BlockEvents


def hashes(*values: int) -> HashArray:
    return np.array(values, dtype=np.uint64)


def test_reports_changes_once_and_in_order() -> None:
    events = BlockEvents()
    events.add(hashes(7, 3, 2**64 - 1))
    events.evict(hashes(9, 1))
    evicted, added = events.drain()
    assert evicted.tolist() == [1, 9]
    assert added.tolist() == [3, 7, 2**64 - 1]
    assert evicted.dtype == added.dtype == np.uint64
    assert [len(part) for part in events.drain()] == [0, 0]


def test_added_then_evicted_within_one_drain_does_not_show() -> None:
    events = BlockEvents()
    events.add(hashes(1, 2, 3))
    events.evict(hashes(2))
    evicted, added = events.drain()
    assert evicted.tolist() == []
    assert added.tolist() == [1, 3]


def test_evicted_then_added_within_one_drain_does_not_show() -> None:
    events = BlockEvents()
    events.evict(hashes(1, 2))
    events.add(hashes(2, 3))
    evicted, added = events.drain()
    assert evicted.tolist() == [1]
    assert added.tolist() == [3]


def test_over_two_drains_both_show() -> None:
    events = BlockEvents()
    events.add(hashes(5))
    events.drain()
    events.evict(hashes(5))
    assert [part.tolist() for part in events.drain()] == [[5], []]

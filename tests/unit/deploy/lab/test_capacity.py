"""What a fleet could take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.lab.capacity import requests_per_s
from deploy.lab.presets import PRESETS
from loadtest.workloads import Arrival, SharedPrefix


class Counted(list[Arrival]):
    """Counts how often it is read through."""

    reads = 0

    def __iter__(self) -> Iterator[Arrival]:
        self.reads += 1
        return super().__iter__()


def arrivals() -> Counted:
    workload = SharedPrefix(num_groups=2, prompts_per_group=8, prefix_tokens=512, unique_tokens=64, max_new_tokens=32)
    return Counted(workload.arrivals(vocab_size=1000, seed=0))


def test_workers_add_up_each_by_its_own_speed() -> None:
    fast, slow = PRESETS["h100-8b"], PRESETS["l4-8b"]
    alone = [requests_per_s([preset], arrivals()) for preset in (fast, slow)]
    assert alone[0] > 2 * alone[1]
    assert requests_per_s([fast, slow, fast], arrivals()) == pytest.approx(2 * alone[0] + alone[1])


def test_the_requests_are_read_as_often_for_a_large_fleet_as_for_one_worker() -> None:
    of_one, of_many = arrivals(), arrivals()
    requests_per_s([PRESETS["h100-8b"]], of_one)
    requests_per_s([PRESETS["h100-8b"]] * 100, of_many)
    assert of_many.reads == of_one.reads

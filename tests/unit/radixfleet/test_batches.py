from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from radixfleet.batches import batches
from radixfleet.v1 import worker_pb2


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_all_go_in_order_in_runs_that_are_no_larger_than_they_must_be(sizes: list[int], most_bytes: int) -> None:
    messages = [worker_pb2.LeaseEvent(lease_id="x" * size) for size in sizes]
    runs = [list(run) for run in batches(messages, most_bytes)]
    assert [message for run in runs for message in run] == messages
    assert all(runs)
    for run, after in pairwise(runs):
        size = sum(message.ByteSize() for message in run)
        assert size <= most_bytes or len([message for message in run if message.ByteSize()]) == 1
        assert size + after[0].ByteSize() > most_bytes

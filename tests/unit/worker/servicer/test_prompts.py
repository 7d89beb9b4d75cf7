"""What a front tells of prompts that are accepted and not computed: additive, and in the end nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.servicer.prefixes import PrefixMirror
from worker.servicer.prompts import ComingPrompts


class Front:
    """Mirror and prompts as the state feed has them, and a watcher that follows what they tell."""

    def __init__(self) -> None:
        self.mirror = PrefixMirror()
        self.prompts = ComingPrompts(self.mirror.blocks)
        self.cached: set[int] = set()
        self.coming: set[int] = set()

    def accept(self, *blocks: int) -> list[int]:
        self.prompts.accept([*blocks])
        return [*blocks]

    def report(self, *, evicted: tuple[int, ...] = (), added: tuple[int, ...] = ()) -> None:
        self.mirror.apply(hashes(evicted), hashes(added))
        self.prompts.reported()

    def tell(self) -> tuple[list[int], list[int]]:
        """One update; returns its `coming` and `gone`."""
        change = self.mirror.commit()
        if change is not None:
            self.cached -= set(unpacked(change.evicted))
            added = set(unpacked(change.added))
            self.cached |= added
            self.coming -= added
        told = self.prompts.commit(change)
        coming, gone = unpacked(told.coming), unpacked(told.gone)
        assert set(gone) <= self.coming
        assert not set(coming) & self.coming, "nothing is told twice"
        self.coming = (self.coming - set(gone)) | set(coming)
        assert sorted(unpacked(self.prompts.whole())) == sorted(self.coming), "a late watcher knows the same"
        return coming, gone


def hashes(blocks: tuple[int, ...]) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


def unpacked(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u8").tolist()


def test_a_prompt_is_coming_from_its_acceptance_until_it_is_cached() -> None:
    front = Front()
    request = front.accept(3, 1, 2)
    assert front.tell() == ([3, 1, 2], [])
    front.report(added=(3, 1))
    assert front.tell() == ([], []), "what is added is not coming any more, and that is not said"
    assert front.coming == {2}
    front.report(added=(2,))
    front.prompts.end(request)
    assert front.tell() == ([], [])
    front.report()
    assert front.tell() == ([], [])
    assert (len(front.prompts), front.coming, front.cached) == (0, set(), {1, 2, 3})


def test_cached_blocks_are_not_coming() -> None:
    front = Front()
    front.report(added=(1, 2))
    front.tell()
    front.accept(1, 2, 3)
    assert front.tell() == ([3], [])


def test_blocks_of_two_requests_come_once_and_go_with_the_last() -> None:
    front = Front()
    first, second = front.accept(1, 2), front.accept(1, 3)
    assert front.tell() == ([1, 2, 3], [])
    front.prompts.end(first)
    front.report()
    assert front.tell() == ([], [2])
    front.prompts.end(second)
    front.report()
    coming, gone = front.tell()
    assert (coming, sorted(gone), len(front.prompts)) == ([], [1, 3], 0)


def test_an_end_counts_after_the_report_that_follows_it() -> None:
    """The report on its way when a request ends has the last of what it left in the cache."""
    front = Front()
    request = front.accept(1)
    front.tell()
    front.prompts.end(request)
    assert front.tell() == ([], [])
    front.report(added=(1,))
    assert front.tell() == ([], [])
    assert (front.coming, front.cached, len(front.prompts)) == (set(), {1}, 0)


def test_a_request_that_ended_before_anything_was_told_says_nothing() -> None:
    front = Front()
    front.prompts.end(front.accept(1, 2))
    front.report()
    assert front.tell() == ([], [])
    assert len(front.prompts) == 0


def test_what_is_evicted_from_a_waiting_prompt_is_coming_again() -> None:
    """So it is when a request was put back: its blocks can be evicted, and it computes them anew."""
    front = Front()
    request = front.accept(1, 2)
    front.report(added=(1, 2))
    front.tell()
    front.report(evicted=(2,))
    assert front.tell() == ([2], [])
    front.prompts.end(request)
    front.report()
    assert front.tell() == ([], [2])


def test_what_is_added_and_evicted_between_two_updates_is_coming_still() -> None:
    front = Front()
    request = front.accept(1)
    front.tell()
    front.report(added=(1,))
    front.report(evicted=(1,))
    assert front.tell() == ([], [])
    assert front.coming == {1}
    front.prompts.end(request)
    front.report()
    assert front.tell() == ([], [1])


BLOCKS = st.lists(st.integers(0, 4), max_size=4, unique=True).map(tuple)
STEPS = st.lists(st.tuples(st.sampled_from(["accept", "end", "report", "tell"]), BLOCKS, BLOCKS), max_size=40)


@given(STEPS)
def test_the_watcher_knows_what_is_accepted_and_not_cached(
    steps: list[tuple[str, tuple[int, ...], tuple[int, ...]]],
) -> None:
    """For any order of acceptance, ends, reports and updates, and whatever the engine caches meanwhile."""
    front = Front()
    running: list[list[int]] = []
    for kind, blocks, others in steps:
        if kind == "accept":
            running.append(front.accept(*blocks))
        elif kind == "end" and running:
            front.prompts.end(running.pop(len(blocks) % len(running)))
        elif kind == "report":
            front.report(evicted=blocks, added=others)
        elif kind == "tell":
            front.tell()
            assert not front.coming & front.cached
            assert {block for prompt in running for block in prompt} - front.cached <= front.coming
    for prompt in running:
        front.prompts.end(prompt)
    front.report()
    front.tell()
    assert (len(front.prompts), front.coming) == (0, set())

"""How deep each worker matches a prompt."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from radixfleet.clock import ManualClock
from router.index import Sketch
from tests.support.chains import NONE, blocks, chain


def sketch_of(*holdings: list[str]) -> Sketch:
    """One worker for each list; it holds the whole chain of each string in it."""
    sketch = Sketch()
    for slot, prefixes in enumerate(holdings):
        assert sketch.attach() == slot
        sketch.set_capacity(slot, 10_000)
        held = [chain(prefix) for prefix in prefixes]
        sketch.apply_digest(slot, 1, 0, np.unique(np.concatenate([NONE, *held])))
    return sketch


def test_each_worker_has_its_own_depth() -> None:
    sketch = sketch_of(["abcd"], ["ab", "xy"], ["abcdef"], [])
    assert sketch.match(chain("abcdeX")).tolist() == [4, 2, 5, 0]


def test_a_prompt_without_a_whole_block_matches_nowhere() -> None:
    assert sketch_of(["a"]).match(NONE).tolist() == [0]


def test_an_unknown_prompt_and_an_empty_fleet() -> None:
    assert sketch_of(["abc"]).match(chain("xyz")).tolist() == [0]
    assert Sketch().match(chain("xyz")).tolist() == []


def test_matching_changes_nothing() -> None:
    sketch = sketch_of(["abc"])
    sketch.match(chain("abcdef"))
    assert sketch.num_blocks == 3
    sketch.check()


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 8, 9, 64, 500])
@pytest.mark.parametrize("num_workers", [1, 8, 70, 1_000])
def test_depths_are_those_of_a_plain_search(num_blocks: int, num_workers: int) -> None:
    random = Random(num_blocks * 10_007 + num_workers)
    hashes = np.array([random.getrandbits(64) for _ in range(num_blocks)], dtype=np.uint64)
    sketch = Sketch()
    depths = []
    for _ in range(num_workers):
        slot = sketch.attach()
        depths.append(random.choice([0, num_blocks, random.randrange(num_blocks + 1)]))
        sketch.set_capacity(slot, num_blocks)
        sketch.apply_digest(slot, 1, 0, hashes[: depths[-1]])
    assert sketch.match(hashes).tolist() == depths


@pytest.mark.parametrize("hole", range(1, 16))
def test_a_hole_never_over_reports(hole: int) -> None:
    """The worker has 12 blocks of 16, and the record of one of them is lost."""
    prompt = chain("abcdefghijklmnop")
    sketch = sketch_of(["abcdefghijkl"])
    assert sketch.apply_delta(0, 1, 1, prompt[hole - 1 : hole], NONE)
    depth = sketch.match(prompt)[0]
    assert depth <= 12
    assert depth == 0 or sketch.match(prompt[depth - 1 : depth]).tolist() == [1]


def test_a_free_slot_matches_nothing() -> None:
    sketch = sketch_of(["ab"], ["ab"], ["ab"])
    sketch.detach(1)
    assert sketch.match(blocks("a", "ab")).tolist() == [2, 0, 2]


class TestUsers:
    """How many requests use what a prompt finds, on each worker."""

    def users(self, sketch: Sketch, letters: str) -> dict[int, int]:
        hashes = chain(letters)
        return sketch.users(hashes, sketch.match(hashes))

    def used_for_s(self, sketch: Sketch, letters: str) -> dict[int, float]:
        hashes = chain(letters)
        return dict(sketch.used_for_s(hashes, sketch.match(hashes)))

    def test_counts_open_leases_on_the_deepest_block_that_matches(self) -> None:
        sketch = sketch_of(["abcd"], ["ab"], [])
        for slot, letters in ((0, "abcX"), (0, "abcdY"), (0, "aZ"), (1, "abW"), (2, "qr")):
            sketch.book(slot, chain(letters), 1_000)
        assert self.users(sketch, "abcdQ") == {0: 1, 1: 1}
        assert self.users(sketch, "abQ") == {0: 2, 1: 1}
        assert self.users(sketch, "aQ") == {0: 3, 1: 1}

    def test_a_prefix_that_nobody_uses_now_has_none(self) -> None:
        sketch = sketch_of(["abc"])
        lease = sketch.book(0, chain("abcd"), 1_000)
        sketch.end(lease)
        assert self.users(sketch, "abcd") == {}

    def test_a_restarted_worker_has_none_and_a_free_slot_neither(self) -> None:
        sketch = sketch_of(["abc"], ["abc"], ["abc"])
        for slot in range(3):
            sketch.book(slot, chain("abc"), 1_000)
        sketch.set_incarnation(1, 2)
        sketch.detach(0)
        assert self.users(sketch, "abcd") == {2: 1}

    def test_how_long_somebody_has_used_it_without_a_break(self) -> None:
        clock = ManualClock(100.0)
        sketch = Sketch(clock)
        for _ in range(2):
            sketch.set_capacity(sketch.attach(), 10_000)
        first = sketch.book(0, chain("abcX"), 1_000)
        clock.advance(2.0)
        second = sketch.book(0, chain("abY"), 1_000)
        sketch.book(1, chain("a"), 1_000)
        clock.advance(3.0)
        assert self.used_for_s(sketch, "abcQ") == {0: 5.0, 1: 3.0}
        assert self.used_for_s(sketch, "abY") == {0: 3.0, 1: 3.0}
        sketch.end(first)
        assert self.used_for_s(sketch, "abcQ") == {1: 3.0}, "nobody uses the third block"
        assert self.used_for_s(sketch, "abQ") == {0: 5.0, 1: 3.0}, "two followed one another"
        sketch.end(second)
        sketch.book(0, chain("ab"), 1_000)
        assert self.used_for_s(sketch, "abQ") == {0: 0.0, 1: 3.0}

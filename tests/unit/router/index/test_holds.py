"""Stretches of leases against counts of single blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.holds import Holds, Stretch
from tests.support.chains import chain

PROMPTS = st.text("ab", min_size=1, max_size=8)


def blocks(letters: str) -> list[int]:
    hashes: list[int] = chain(letters).tolist()
    return hashes


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 9)), max_size=30))
@settings(deadline=None)
def test_a_stretch_counts_what_single_blocks_would(steps: list[tuple[str, int]]) -> None:
    """Each step leases a prompt, or ends one of the leases that are open, in any order."""
    holds, counts, since_s = Holds(), Counter[int](), dict[int, float]()
    leases: list[list[int]] = []
    for now_s, (letters, pick) in enumerate(steps):
        if pick < len(leases):
            ended = leases.pop(pick)
            counts.subtract(ended)
            assert holds.unlease(ended) == [block for block in ended if not counts[block]]
        else:
            new = blocks(letters)
            assert holds.lease(new, float(now_s)) == [block for block in new if not counts[block]]
            since_s |= {block: float(now_s) for block in new if not counts[block]}
            counts.update(new)
            leases.append(new)
        holds.check()
        counts = +counts
        assert holds.leased.keys() == counts.keys()
        for block, count in counts.items():
            assert (holds.users(block), holds.used_since_s(block)) == (count, since_s[block])


def test_a_request_more_on_a_long_prefix_touches_no_block_of_it() -> None:
    """What hundreds share is one stretch, however long it is: only the blocks behind it are new."""
    holds, shared = Holds(), "a" * 500
    first = holds.lease(blocks(shared + "b"), 0.0)
    assert len(first) == 501
    assert holds.lease(blocks(shared + "c"), 1.0) == blocks(shared + "c")[500:], "the first stretch is cut here"
    stretch = holds.leased[blocks(shared)[-1]]
    assert holds.leased[blocks("a")[0]] is stretch
    for number in range(50):
        letters = shared + chr(ord("d") + number)
        assert len(holds.lease(blocks(letters), 2.0)) == 1
    assert stretch.users == 52
    assert holds.leased[blocks(shared)[-1]] is stretch


class Written(dict[int, Stretch]):
    """Counts the labels that are written."""

    count = 0

    def __setitem__(self, block: int, stretch: Stretch) -> None:
        self.count += 1
        super().__setitem__(block, stretch)


@pytest.mark.parametrize("lengths", [range(499, 399, -1), range(1, 101)], ids=["shorter", "longer"])
def test_a_cut_labels_the_shorter_part(lengths: range) -> None:
    """A long prompt that is asked a block shorter, or longer, each time: one block a cut gets another stretch."""
    holds = Holds()
    holds.leased = written = Written()
    holds.lease(blocks("a" * 500), 0.0)
    assert written.count == 500
    for length in lengths:
        holds.lease(blocks("a" * length), 1.0)
    assert written.count == 500 + len(lengths)
    holds.check()


def test_cuts_that_halve_label_half() -> None:
    holds = Holds()
    holds.leased = written = Written()
    holds.lease(blocks("a" * 512), 0.0)
    for number in range(1, 10):
        step = 512 >> number
        for length in range(step, 512, 2 * step):
            holds.lease(blocks("a" * length), 1.0)
    assert len(set(holds.leased.values())) == 512
    assert written.count == 512 + 9 * 256, "n log2(n)/2"
    holds.check()

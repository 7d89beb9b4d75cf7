"""The mirror of cached blocks, against the plainest model of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.servicer.prefixes import PrefixMirror

BLOCKS = st.sets(st.integers(0, 7), max_size=5)


def hashes(blocks: set[int]) -> np.ndarray:
    return np.array(sorted(blocks), dtype=np.uint64)


def unpack(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u8").tolist()


@given(reports=st.lists(st.tuples(BLOCKS, BLOCKS, st.booleans()), max_size=30))
def test_deltas_carry_a_watcher_from_digest_to_digest(reports: list[tuple[set[int], set[int], bool]]) -> None:
    """Behaviour 50: whoever applies the numbered changes, evictions first, has what the engine has."""
    mirror = PrefixMirror()
    engine: set[int] = set()
    watcher: set[int] = set()
    sequence = 0
    for evicted, added, commits in reports:
        mirror.apply(hashes(evicted), hashes(added))
        engine = (engine - evicted) | added
        if not commits:
            continue
        change = mirror.commit()
        if change is None:
            assert watcher == engine
        else:
            sequence += 1
            assert change.sequence == mirror.sequence == sequence
            assert set(unpack(change.evicted)) <= watcher
            assert not set(unpack(change.added)) & watcher
            watcher = (watcher - set(unpack(change.evicted))) | set(unpack(change.added))
            assert watcher == engine
        assert unpack(mirror.digest()) == sorted(engine)


def test_a_block_that_came_and_went_between_two_updates_is_not_told() -> None:
    mirror = PrefixMirror()
    mirror.apply(hashes(set()), hashes({1}))
    mirror.apply(hashes({1}), hashes(set()))
    assert mirror.commit() is None
    assert mirror.sequence == 0


def test_hashes_travel_as_little_endian_64_bit_numbers() -> None:
    mirror = PrefixMirror()
    mirror.apply(hashes(set()), np.array([2**64 - 1, 1], dtype=np.uint64))
    change = mirror.commit()
    assert change is not None
    assert change.added == b"\1" + b"\0" * 7 + b"\xff" * 8

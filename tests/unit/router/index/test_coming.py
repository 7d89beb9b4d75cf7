"""Blocks that a worker says it is going to compute: held like leased ones, until they are cached or come no more."""

from __future__ import annotations

import numpy as np
import pytest

from radixfleet.blocks import BLOCK_TOKENS
from router.index import Sketch
from router.index.expectations import GRACE_REPORTS
from tests.support.chains import NONE, blocks, chain

ENGINE = 11


@pytest.fixture
def sketch() -> Sketch:
    """One worker, slot 0, room for 4 blocks, which has just said that it holds nothing."""
    sketch = Sketch()
    sketch.set_capacity(sketch.attach(), 4)
    sketch.apply_digest(0, ENGINE, 0, NONE)
    return sketch


def depth(sketch: Sketch, letters: str) -> int:
    sketch.check()
    return int(sketch.match(chain(letters))[0])


def test_what_is_coming_is_expected_at_once(sketch: Sketch) -> None:
    """Behaviour 51: a router knows of a prompt that another has just placed."""
    sketch.apply_coming(0, chain("abc"))
    assert depth(sketch, "abcd") == 3
    depths = sketch.match(chain("abcd"))
    assert sketch.users(chain("abcd"), depths) == {}, "nobody here uses it"


def test_what_is_coming_waits_as_long_as_it_takes(sketch: Sketch) -> None:
    """However many reports pass, and whatever else is added, it is not dropped to make room."""
    sketch.apply_coming(0, chain("abc"))
    for _ in range(2 * GRACE_REPORTS):
        assert sketch.apply_delta(0, ENGINE, 0, NONE, NONE)
    assert sketch.apply_delta(0, ENGINE, 1, NONE, chain("mnopqrstu"))
    assert depth(sketch, "abc") == 3


def test_what_comes_is_settled_by_the_report_that_adds_it(sketch: Sketch) -> None:
    sketch.apply_coming(0, chain("abc"))
    assert sketch.apply_delta(0, ENGINE, 1, NONE, chain("abc"))
    sketch.apply_coming(0, NONE, chain("abc"))
    assert depth(sketch, "abc") == 3, "it is cached: that it is not coming any more changes nothing"
    assert sketch.apply_delta(0, ENGINE, 2, blocks("abc"), NONE)
    assert depth(sketch, "abc") == 2


def test_what_comes_no_more_leaves(sketch: Sketch) -> None:
    sketch.apply_coming(0, chain("abc"))
    sketch.apply_coming(0, NONE, blocks("abc"))
    assert depth(sketch, "abc") == 2
    sketch.apply_coming(0, chain("xy"), chain("ab"))
    assert (depth(sketch, "abc"), depth(sketch, "xy")) == (0, 2)


def test_our_own_requests_keep_what_comes_no_more(sketch: Sketch) -> None:
    """The other's request was aborted; ours is on its way."""
    sketch.apply_coming(0, chain("ab"))
    lease = sketch.book(0, chain("ab"), 200)
    assert lease.known_blocks == 2
    sketch.apply_coming(0, NONE, chain("ab"))
    assert depth(sketch, "ab") == 2
    sketch.abandon(lease)
    assert depth(sketch, "ab") == 0


@pytest.mark.parametrize("computed", [True, False])
def test_what_comes_outlives_our_own_requests(sketch: Sketch, computed: bool) -> None:
    lease = sketch.book(0, chain("ab"), 200)
    sketch.apply_coming(0, chain("ab"))
    if computed:
        sketch.end(lease)
    else:
        sketch.abandon(lease)
    for _ in range(2 * GRACE_REPORTS):
        assert sketch.apply_delta(0, ENGINE, 0, NONE, NONE)
    assert depth(sketch, "ab") == 2
    sketch.apply_coming(0, NONE, chain("ab"))
    assert depth(sketch, "ab") == 0


def test_a_digest_begins_anew(sketch: Sketch) -> None:
    sketch.apply_coming(0, chain("abc"))
    sketch.apply_digest(0, ENGINE, 3, chain("m"))
    sketch.apply_coming(0, chain("xy"))
    assert [depth(sketch, letters) for letters in ("abc", "m", "xy")] == [0, 1, 2]


def test_a_restart_wipes_what_was_coming(sketch: Sketch) -> None:
    sketch.apply_coming(0, chain("abc"))
    sketch.set_incarnation(0, ENGINE + 1)
    assert depth(sketch, "abc") == 0


def test_without_word_from_the_worker_nothing_is_coming(sketch: Sketch) -> None:
    """What was, is taken for cached, as the blocks of our own requests that have ended are; and may be dropped."""
    sketch.apply_coming(0, chain("abc"))
    sketch.lose_truth(0)
    assert depth(sketch, "abc") == 3
    sketch.apply_coming(0, chain("mnop"))
    assert depth(sketch, "mnop") == 0
    sketch.end(sketch.book(0, chain("wxyz"), 300))
    assert (depth(sketch, "abc"), depth(sketch, "wxyz")) == (0, 4)


def test_a_worker_that_tells_nothing_of_it_is_followed_as_ever(sketch: Sketch) -> None:
    sketch.apply_coming(0, NONE, NONE)
    sketch.apply_coming(0, np.empty(0, dtype=np.uint64))
    assert sketch.apply_delta(0, ENGINE, 1, NONE, chain("ab"))
    assert depth(sketch, "ab") == 2


def test_what_others_bring_is_begun_after_a_prompt_that_is_cached(sketch: Sketch) -> None:
    """Behaviour 51: the worker begins first what has most cached, so another router's new prompt takes nothing from it.

    Once we book that prompt too it is one that was here as deep and came before, and is begun first.
    """
    assert sketch.apply_delta(0, ENGINE, 1, NONE, chain("abcd"))
    sketch.apply_coming(0, chain("wxyz"))
    lease = sketch.book(0, chain("abcd"), 4 * BLOCK_TOKENS + 1)
    assert lease.predicted_tokens == 4 * BLOCK_TOKENS
    sketch.abandon(lease)
    sketch.book(0, chain("wxyz"), 4 * BLOCK_TOKENS + 1)
    lease = sketch.book(0, chain("abcd"), 4 * BLOCK_TOKENS + 1)
    assert lease.predicted_tokens < 4 * BLOCK_TOKENS

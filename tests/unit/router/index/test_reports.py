"""What digests and deltas of a worker do to its sketch."""

from __future__ import annotations

import numpy as np
import pytest

from radixfleet.blocks import BLOCK_TOKENS
from router.index import BlockLease, Sketch
from router.index.expectations import GRACE_REPORTS
from tests.support.chains import NONE, blocks, chain

OLD, NEW = 11, 22


@pytest.fixture
def sketch() -> Sketch:
    """One worker, slot 0, room for 8 blocks, which has just said that it holds nothing."""
    sketch = Sketch()
    sketch.set_capacity(sketch.attach(), 8)
    sketch.apply_digest(0, OLD, 5, NONE)
    return sketch


def heartbeats(sketch: Sketch, count: int, *, sequence: int = 5) -> None:
    for _ in range(count):
        assert sketch.apply_delta(0, OLD, sequence, NONE, NONE)


def test_deltas_apply_evictions_first(sketch: Sketch) -> None:
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("abc"))
    assert sketch.match(chain("abcd")).tolist() == [3]
    assert sketch.apply_delta(0, OLD, 7, blocks("abc", "ab"), blocks("ab"))
    assert sketch.match(chain("abcd")).tolist() == [2]
    sketch.check()


def test_evicting_what_is_not_there_is_harmless(sketch: Sketch) -> None:
    assert sketch.apply_delta(0, OLD, 6, chain("xyz"), chain("a"))
    assert sketch.num_blocks == 1
    sketch.check()


def test_truth_is_approximate_until_the_first_digest() -> None:
    sketch = Sketch()
    slot = sketch.attach()
    sketch.set_capacity(slot, 8)
    assert sketch.approximate(slot)
    assert not sketch.apply_delta(slot, OLD, 1, NONE, chain("abc")), (
        "a delta with nothing to build on asks for a digest"
    )
    assert sketch.num_blocks == 0
    sketch.apply_digest(slot, OLD, 1, chain("abc"))
    assert not sketch.approximate(slot)


@pytest.mark.parametrize("sequence", [5, 4, 7, 100])
def test_a_gap_asks_for_a_digest(sketch: Sketch, sequence: int) -> None:
    """Behaviour 50: a delta that does not follow the last one is not applied, and the router asks for a resync."""
    assert not sketch.apply_delta(0, OLD, sequence, NONE, chain("abc"))
    assert sketch.approximate(0)
    assert sketch.match(chain("abc")).tolist() == [0]
    assert not sketch.apply_delta(0, OLD, sequence + 1, NONE, chain("abc")), "still waiting for the digest"
    sketch.apply_digest(0, OLD, sequence + 1, chain("abc"))
    assert not sketch.approximate(0)
    assert sketch.match(chain("abc")).tolist() == [3]
    assert sketch.apply_delta(0, OLD, sequence + 2, NONE, blocks("abcd"))


def test_a_heartbeat_with_another_number_is_a_gap(sketch: Sketch) -> None:
    """Behaviour 50: the update with the change was lost, and the one after it has none."""
    assert sketch.apply_delta(0, OLD, 5, NONE, NONE)
    assert not sketch.apply_delta(0, OLD, 6, NONE, NONE)
    assert sketch.approximate(0)


@pytest.mark.parametrize("by_digest", [True, False])
def test_a_restart_wipes_the_slot_at_once(sketch: Sketch, by_digest: bool) -> None:
    """Behaviour 50: a new incarnation holds nothing of the old one, blocks of running requests included."""
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("abc"))
    lease = sketch.book(0, chain("xyz"), 200)
    if by_digest:
        sketch.apply_digest(0, NEW, 0, blocks("m"))
        assert sketch.num_blocks == 1
    else:
        assert not sketch.apply_delta(0, NEW, 7, NONE, chain("m"))
        assert sketch.num_blocks == 0
    assert sketch.match(chain("abc")).tolist() == [0]
    assert sketch.match(chain("xyz")).tolist() == [0]
    sketch.end(lease, chain("xyzw")[3:])
    assert sketch.match(chain("xyzw")).tolist() == [0], "the request died with the old engine"
    assert sketch.open_leases == 0
    sketch.check()


def test_the_same_incarnation_wipes_nothing(sketch: Sketch) -> None:
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("abc"))
    sketch.set_incarnation(0, OLD)
    assert sketch.match(chain("abc")).tolist() == [3]
    sketch.set_incarnation(0, NEW)
    assert sketch.match(chain("abc")).tolist() == [0]
    assert sketch.approximate(0)


def test_a_router_that_joins_late_gets_the_roots() -> None:
    """Behaviour 50: the digest has all blocks, so a prompt that shares only the root matches too."""
    sketch = Sketch()
    sketch.set_capacity(sketch.attach(), 100)
    sketch.apply_digest(0, OLD, 900, np.sort(np.concatenate([chain("abcdef"), chain("abxy")[2:]])))
    assert sketch.match(chain("azz")).tolist() == [1]
    assert sketch.match(chain("abxz")).tolist() == [3]
    assert sketch.apply_delta(0, OLD, 901, blocks("abcdef"), blocks("abcdex"))
    assert sketch.match(chain("abcdex")).tolist() == [6]


def test_a_digest_replaces_all_but_blocks_in_flight(sketch: Sketch) -> None:
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("abc"))
    lease = sketch.book(0, chain("axy"), 200)
    sketch.apply_digest(0, OLD, 9, chain("amn"))
    assert sketch.match(chain("abc")).tolist() == [1]
    assert sketch.match(chain("amn")).tolist() == [3]
    assert sketch.match(chain("axy")).tolist() == [3], "in flight: not in the digest yet"
    sketch.check()
    sketch.end(lease)
    heartbeats(sketch, GRACE_REPORTS, sequence=9)
    assert sketch.match(chain("axy")).tolist() == [1], "and the worker never reported it"
    sketch.check()


def test_a_booked_block_that_the_worker_reports_stays(sketch: Sketch) -> None:
    lease = sketch.book(0, chain("abc"), 200)
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("abc"))
    sketch.end(lease)
    heartbeats(sketch, 10, sequence=6)
    assert sketch.match(chain("abc")).tolist() == [3]
    sketch.check()


def test_a_booked_block_that_the_worker_never_reports_goes(sketch: Sketch) -> None:
    lease = sketch.book(0, chain("abc"), 200)
    heartbeats(sketch, 10)
    assert sketch.match(chain("abc")).tolist() == [3], "the request still runs"
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("a"))
    sketch.end(lease, chain("abcd")[3:])
    heartbeats(sketch, GRACE_REPORTS - 1, sequence=6)
    assert sketch.match(chain("abcd")).tolist() == [4], "the report may be under way"
    heartbeats(sketch, 1, sequence=6)
    assert sketch.match(chain("abcd")).tolist() == [1]
    assert sketch.num_blocks == 1
    sketch.check()


def test_a_report_in_the_time_of_grace_settles_it(sketch: Sketch) -> None:
    sketch.end(sketch.book(0, chain("ab"), 200), chain("abc")[2:])
    heartbeats(sketch, GRACE_REPORTS - 1)
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("abc"))
    heartbeats(sketch, 10, sequence=6)
    assert sketch.match(chain("abc")).tolist() == [3]


def test_a_silent_worker_loses_nothing(sketch: Sketch) -> None:
    for letters in ("ab", "cd", "ef"):
        sketch.end(sketch.book(0, chain(letters), 200))
    assert [sketch.match(chain(letters)).tolist() for letters in ("ab", "cd", "ef")] == [[2]] * 3
    sketch.check()


def test_a_later_lease_puts_the_date_off(sketch: Sketch) -> None:
    sketch.end(sketch.book(0, chain("ab"), 200))
    heartbeats(sketch, 1)
    second = sketch.book(0, chain("ab"), 200)
    heartbeats(sketch, GRACE_REPORTS)
    assert sketch.match(chain("ab")).tolist() == [2]
    sketch.end(second)
    heartbeats(sketch, GRACE_REPORTS - 1)
    assert sketch.match(chain("ab")).tolist() == [2]
    heartbeats(sketch, 1)
    assert sketch.match(chain("ab")).tolist() == [0]
    sketch.check()


def test_an_eviction_that_crosses_a_booking(sketch: Sketch) -> None:
    """The worker evicted the prefix before the request came, and computes it anew: expected until it says so."""
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("ab"))
    lease = sketch.book(0, chain("ab"), 200)
    assert sketch.apply_delta(0, OLD, 7, chain("ab"), NONE)
    assert sketch.match(chain("ab")).tolist() == [2]
    sketch.end(lease)
    heartbeats(sketch, GRACE_REPORTS, sequence=7)
    assert sketch.match(chain("ab")).tolist() == [0]
    sketch.check()


def test_an_expected_block_reported_as_evicted_goes_at_once(sketch: Sketch) -> None:
    sketch.end(sketch.book(0, chain("ab"), 200))
    assert sketch.apply_delta(0, OLD, 6, blocks("ab"), NONE)
    assert sketch.match(chain("ab")).tolist() == [1]
    sketch.check()


def test_an_abandoned_request_leaves_what_the_worker_reported(sketch: Sketch) -> None:
    lease = sketch.book(0, chain("abc"), 200)
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("ab"))
    sketch.abandon(lease)
    assert sketch.match(chain("abc")).tolist() == [2]
    sketch.check()


def test_receipts_teach_nothing_where_there_are_reports(sketch: Sketch) -> None:
    assert sketch.apply_delta(0, OLD, 6, NONE, chain("abc"))
    lease = sketch.book(0, chain("abc"), 200)
    sketch.receipt(lease, 0)
    assert sketch.capacity_blocks(0) == 8
    assert sketch.match(chain("abc")).tolist() == [3]
    sketch.end(lease)


def test_when_reports_stop_the_own_record_counts(sketch: Sketch) -> None:
    sketch.end(sketch.book(0, chain("ab"), 200))
    running = sketch.book(0, chain("xy"), 200)
    sketch.lose_truth(0)
    assert sketch.approximate(0)
    assert sketch.match(chain("ab")).tolist() == [2]
    sketch.abandon(running)
    assert sketch.match(chain("xy")).tolist() == [0]
    sketch.check()


def test_a_worker_that_only_adds_stays_bounded(sketch: Sketch) -> None:
    """Behaviour 49: even a worker that forgets to report evictions costs no more than twice its capacity."""
    for number in range(100):
        hashes = np.arange(number * 10 + 1, number * 10 + 11, dtype=np.uint64)
        assert sketch.apply_delta(0, OLD, 6 + number, NONE, hashes)
        assert sketch.blocks(0) <= 2 * 8
    sketch.check()


def test_a_digest_with_repetitions_in_it(sketch: Sketch) -> None:
    sketch.apply_digest(0, OLD, 9, np.concatenate([chain("ab"), chain("ab")]))
    assert sketch.apply_delta(0, OLD, 10, np.concatenate([blocks("ab"), blocks("ab")]), np.repeat(blocks("ac"), 3))
    assert sketch.num_blocks == 2
    sketch.check()


class TestForesight:
    """A full worker makes room for what it begins: what waits there drives out what was used least recently."""

    @pytest.fixture
    def full(self, sketch: Sketch) -> Sketch:
        """Has `abcd`, used longer ago, and `wxyz`."""
        assert sketch.apply_delta(0, OLD, 6, NONE, chain("abcd"))
        assert sketch.apply_delta(0, OLD, 7, NONE, chain("wxyz"))
        return sketch

    def test_what_begins_earlier_drives_out_the_deep_end(self, full: Sketch) -> None:
        book(full, "wxyzpq")
        lease = book(full, "abcde")
        assert (lease.known_blocks, lease.lasting_blocks) == (4, 2)
        assert lease.predicted_tokens == 2 * BLOCK_TOKENS
        assert full.match(chain("abcd")).tolist() == [4], "it is there until then, and best computed again there"

    def test_a_worker_begins_first_what_has_more_of_its_prompt_cached(self, full: Sketch) -> None:
        waits = book(full, "pqr")
        assert book(full, "abcde").lasting_blocks == 4
        full.receipt(waits, 0)
        assert book(full, "ab").lasting_blocks == 2, "in use by the request before"

    def test_what_has_begun_has_taken_its_room(self, full: Sketch) -> None:
        full.receipt(book(full, "pqr"), 0)
        assert book(full, "abcd").lasting_blocks == 1

    @pytest.mark.parametrize("ends", ["end", "abandon"])
    def test_what_never_begins_takes_no_room_for_long(self, full: Sketch, ends: str) -> None:
        lease = book(full, "wxyzpq")
        full.end(lease) if ends == "end" else full.abandon(lease)
        heartbeats(full, GRACE_REPORTS, sequence=7)
        assert book(full, "abcd").lasting_blocks == 4
        full.check()

    def test_the_worker_tells_what_went(self, full: Sketch) -> None:
        full.receipt(book(full, "pqr"), 0)
        assert full.apply_delta(0, OLD, 8, blocks("abcd", "abc", "ab"), chain("pqr"))
        lease = book(full, "abcd")
        assert (lease.known_blocks, lease.lasting_blocks) == (1, 1)

    def test_blocks_that_share_pages_are_no_excess(self, full: Sketch) -> None:
        assert full.apply_delta(0, OLD, 8, NONE, chain("mnop"))
        assert book(full, "abcd").lasting_blocks == 4

    def test_what_is_in_use_stays(self, full: Sketch) -> None:
        book(full, "abcd")
        full.receipt(book(full, "pqr"), 0)
        assert book(full, "abcde").lasting_blocks == 4

    def test_without_word_from_the_worker_what_is_booked_has_driven_it_out_already(self) -> None:
        sketch = Sketch()
        sketch.set_capacity(sketch.attach(), 8)
        for prompt in ("abcd", "wxyz"):
            sketch.end(book(sketch, prompt))
        book(sketch, "pqr")
        lease = book(sketch, "abcd")
        assert (lease.known_blocks, lease.lasting_blocks) == (1, 1)


def book(sketch: Sketch, letters: str) -> BlockLease:
    return sketch.book(0, chain(letters), len(letters) * BLOCK_TOKENS + 1)

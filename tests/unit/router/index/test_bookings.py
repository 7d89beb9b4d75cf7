"""What bookings, their ends and receipts do to the sketch of a worker that reports nothing."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from radixfleet.blocks import BLOCK_TOKENS
from router.index import BlockLease, Sketch
from tests.support.chains import blocks, chain


@pytest.fixture
def sketch() -> Sketch:
    """One worker, slot 0, with room for 8 blocks."""
    sketch = Sketch()
    sketch.set_capacity(sketch.attach(), 8)
    return sketch


def book(sketch: Sketch, letters: str, *, slot: int = 0, extra_tokens: int = 10) -> BlockLease:
    return sketch.book(slot, chain(letters), len(letters) * BLOCK_TOKENS + extra_tokens)


def serve(sketch: Sketch, letters: str, output: str = "") -> None:
    """Book a prompt and end it, with the output's blocks behind it."""
    sketch.end(book(sketch, letters), chain(letters + output)[len(letters) :])


def test_a_booking_is_seen_by_the_next_choice(sketch: Sketch) -> None:
    """Behaviour 45: what was booked counts at once, before the worker has said anything."""
    lease = book(sketch, "abc")
    assert lease.known_blocks == 0
    assert sketch.match(chain("abcd")).tolist() == [3]
    assert book(sketch, "abcd").known_blocks == 3
    sketch.check()


def test_the_next_turn_of_a_chat_finds_the_answer(sketch: Sketch) -> None:
    """Behaviour 26, in the sketch: output blocks are there after the end."""
    serve(sketch, "ab", output="xy")
    assert sketch.match(chain("abxyz")).tolist() == [4]


def test_prediction_never_covers_the_last_token(sketch: Sketch) -> None:
    serve(sketch, "ab")
    assert book(sketch, "ab", extra_tokens=0).predicted_tokens == 2 * BLOCK_TOKENS - 1
    assert book(sketch, "ab", extra_tokens=1).predicted_tokens == 2 * BLOCK_TOKENS
    assert book(sketch, "xy").predicted_tokens == 0


def test_least_recently_used_leaves_first_and_from_its_deep_end(sketch: Sketch) -> None:
    serve(sketch, "abcd")
    serve(sketch, "wxyz")
    serve(sketch, "ab")
    serve(sketch, "pq")
    assert sketch.match(chain("abcd")).tolist() == [2], "c and d were used last when abcd was"
    assert sketch.match(chain("wxyz")).tolist() == [4]
    serve(sketch, "mn")
    assert sketch.match(chain("wxyz")).tolist() == [2]
    assert sketch.match(chain("ab")).tolist() == [2]
    assert sketch.blocks(0) == 8
    sketch.check()


def test_blocks_of_running_requests_stay(sketch: Sketch) -> None:
    lease = book(sketch, "abcdef")
    for letters in ("mnop", "qrst", "uvwx"):
        serve(sketch, letters)
    assert sketch.match(chain("abcdef")).tolist() == [6]
    assert sketch.blocks(0) == 8
    sketch.end(lease)
    serve(sketch, "ghijklmn")
    assert sketch.match(chain("abcdef")).tolist() == [0]
    sketch.check()


def test_leases_alone_may_exceed_the_capacity(sketch: Sketch) -> None:
    leases = [book(sketch, letters) for letters in ("abcdef", "ghijkl", "mnopqr")]
    assert sketch.blocks(0) == 18
    for lease in leases:
        sketch.end(lease)
        sketch.check()
    assert sketch.blocks(0) == 8
    assert sketch.open_leases == 0


def test_two_leases_on_one_prefix(sketch: Sketch) -> None:
    first, second = book(sketch, "abc"), book(sketch, "abcd")
    sketch.end(first)
    serve(sketch, "qrstuvwx")
    assert sketch.match(chain("abcd")).tolist() == [4], "the second request still runs"
    sketch.end(second)
    serve(sketch, "qrstuvwx")
    assert sketch.match(chain("abcd")).tolist() == [0]
    sketch.check()


def test_ending_twice_does_nothing(sketch: Sketch) -> None:
    first, second = book(sketch, "ab"), book(sketch, "ab")
    sketch.end(first)
    sketch.end(first)
    sketch.abandon(first)
    assert sketch.open_leases == 1
    serve(sketch, "mnopqrst")
    assert sketch.match(chain("ab")).tolist() == [2]
    sketch.end(second)
    assert sketch.open_leases == 0
    sketch.check()


def test_a_request_that_never_began_leaves_nothing(sketch: Sketch) -> None:
    serve(sketch, "ab")
    lease = book(sketch, "abcd")
    sketch.abandon(lease)
    assert sketch.match(chain("abcd")).tolist() == [2]
    assert sketch.blocks(0) == 2
    sketch.check()


def test_what_another_request_brings_stays_until_that_fails_too(sketch: Sketch) -> None:
    first, second, third = (book(sketch, "abc") for _ in range(3))
    sketch.abandon(first)
    assert sketch.match(chain("abc")).tolist() == [3]
    sketch.abandon(second)
    sketch.abandon(third)
    assert sketch.num_blocks == 0
    sketch.check()


def test_what_another_request_has_computed_stays(sketch: Sketch) -> None:
    first, second = book(sketch, "abc"), book(sketch, "abc")
    sketch.end(second)
    sketch.abandon(first)
    assert sketch.match(chain("abc")).tolist() == [3]
    sketch.check()


def test_without_a_capacity_only_running_requests_count() -> None:
    sketch = Sketch()
    lease = sketch.book(sketch.attach(), chain("abc"), 200)
    assert sketch.match(chain("abc")).tolist() == [3]
    sketch.end(lease)
    assert sketch.num_blocks == 0


def test_a_smaller_capacity_holds_at_once(sketch: Sketch) -> None:
    serve(sketch, "abcdefgh")
    sketch.set_capacity(0, 3)
    assert sketch.match(chain("abcdefgh")).tolist() == [3]
    sketch.check()


def test_a_receipt_that_falls_short_drops_what_is_as_old_and_shrinks_the_model(sketch: Sketch) -> None:
    serve(sketch, "mn")
    serve(sketch, "abcd")
    serve(sketch, "xy")
    lease = book(sketch, "abc")
    sketch.receipt(lease, BLOCK_TOKENS)
    assert sketch.match(chain("abcd")).tolist() == [3], "its own blocks are being computed, the one behind them is gone"
    assert sketch.match(chain("mn")).tolist() == [0], "older than what the worker had evicted"
    assert sketch.match(chain("xy")).tolist() == [2], "used later"
    assert sketch.capacity_blocks(0) == 8 - 2
    sketch.end(lease)
    sketch.check()


def test_the_model_never_falls_below_half_and_recovers_slowly(sketch: Sketch) -> None:
    sketch.set_capacity(0, 1_000)
    for _ in range(200):
        serve(sketch, "abcdefgh")
        lease = book(sketch, "abcdefgh")
        sketch.receipt(lease, 0)
        sketch.end(lease)
    assert sketch.capacity_blocks(0) == 500
    capacities = []
    for _ in range(2_000):
        lease = book(sketch, "ab")
        sketch.receipt(lease, lease.predicted_tokens)
        sketch.end(lease)
        capacities.append(sketch.capacity_blocks(0))
    assert capacities[0] == 500 + 1 + 500 // 256
    assert capacities == sorted(capacities)
    assert capacities[-1] == 1_000


def test_a_new_capacity_keeps_what_receipts_taught_within_it(sketch: Sketch) -> None:
    serve(sketch, "abcd")
    lease = book(sketch, "abcd")
    sketch.receipt(lease, 0)
    sketch.end(lease)
    assert sketch.capacity_blocks(0) == 4
    sketch.set_capacity(0, 8)
    assert sketch.capacity_blocks(0) == 4
    sketch.set_capacity(0, 20)
    assert sketch.capacity_blocks(0) == 10
    sketch.set_capacity(0, 6)
    assert sketch.capacity_blocks(0) == 6


def test_a_prediction_on_blocks_in_flight_teaches_nothing(sketch: Sketch) -> None:
    serve(sketch, "xy")
    first, second = book(sketch, "abc"), book(sketch, "abc")
    sketch.receipt(second, 0)
    assert sketch.capacity_blocks(0) == 8
    assert sketch.match(chain("xy")).tolist() == [2]
    sketch.end(first)
    sketch.end(second)


def test_the_part_of_a_block_that_a_worker_cached_is_no_miss(sketch: Sketch) -> None:
    """A prompt of exactly two blocks: the worker computes its last page, so it reports less than two blocks."""
    serve(sketch, "ab")
    lease = book(sketch, "ab", extra_tokens=0)
    sketch.receipt(lease, 2 * BLOCK_TOKENS - 16)
    assert sketch.capacity_blocks(0) == 8


def test_endless_distinct_prompts_fit_in_bounded_memory() -> None:
    """Behaviour 49: 200,000 distinct blocks through four workers of 500 blocks."""
    sketch, rng = Sketch(), np.random.default_rng(0)
    for _ in range(4):
        sketch.set_capacity(sketch.attach(), 500)
    sizes = []
    tracemalloc.start()
    for number in range(20_000):
        hashes = rng.integers(0, 2**63, 10, dtype=np.uint64)
        sketch.end(sketch.book(number % 4, hashes[:7], 500), hashes[7:])
        assert sketch.num_blocks <= 4 * 500
        if number in (10_000, 19_999):
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] < 1.2 * sizes[0] + 100_000
    assert sizes[1] < 4 * 500 * 1_000
    sketch.check()


def test_endless_use_of_one_prompt_fits_in_bounded_memory() -> None:
    """Behaviour 49: records of uses do not pile up either."""
    sketch = Sketch()
    sketch.set_capacity(sketch.attach(), 500)
    hashes = np.arange(1, 101, dtype=np.uint64)
    tracemalloc.start()
    for _ in range(5_000):
        sketch.end(sketch.book(0, hashes, 6_500))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sketch.num_blocks == 100
    assert size < 200_000, "5,000 records of 100 blocks would be 4 MB"


def test_masks_of_blocks_that_nobody_holds_are_gone(sketch: Sketch) -> None:
    second = sketch.attach()
    sketch.set_capacity(second, 8)
    serve(sketch, "ab")
    sketch.end(book(sketch, "ab", slot=second))
    assert sketch.match(blocks("ab")).tolist() == [1, 1]
    sketch.wipe(0)
    assert sketch.match(blocks("ab")).tolist() == [0, 1]
    assert sketch.num_blocks == 2
    sketch.detach(second)
    assert sketch.num_blocks == 0


def test_a_slot_is_used_again_clean(sketch: Sketch) -> None:
    second = sketch.attach()
    old = book(sketch, "abc")
    sketch.detach(0)
    assert sketch.attach() == 0
    assert second == 1
    sketch.set_capacity(0, 8)
    assert sketch.match(chain("abc")).tolist() == [0, 0]
    sketch.receipt(old, 0)
    sketch.end(old, chain("abcde")[3:])
    assert sketch.match(chain("abcde")).tolist() == [0, 0], "the lease belonged to the worker that left"
    assert sketch.capacity_blocks(0) == 8
    assert sketch.open_leases == 0
    sketch.check()


def test_a_slot_that_is_not_attached_is_refused(sketch: Sketch) -> None:
    for slot in (-1, 1, 99):
        with pytest.raises(KeyError, match=str(slot)):
            sketch.blocks(slot)
    sketch.detach(0)
    with pytest.raises(KeyError):
        sketch.book(0, chain("a"), 64)


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_that_another_one_replaced_unseen_is_found_out_by_few_receipts(seed: int) -> None:
    """Each that finds nothing of a prefix forgets all that was used before it, too."""
    sketch = Sketch()
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(1, 1 << 62, size=(256, 10), dtype=np.uint64)
    sketch.set_capacity(sketch.attach(), 2 * prefixes.size)
    for prefix in prefixes:
        sketch.end(sketch.book(0, prefix, 650))
    wrong = 0
    for prefix in rng.permutation(prefixes):
        lease = sketch.book(0, prefix, 650)
        wrong += lease.predicted_tokens > 0
        sketch.receipt(lease, 0)
        sketch.end(lease)
    assert 1 <= wrong <= 16, "of 256 that were remembered"
    sketch.check()

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest

from radixfleet import convert
from radixfleet.access import Access
from radixfleet.types import Capacity, Load, WorkerStatus
from radixfleet.v1 import worker_pb2
from router.index.expectations import GRACE_REPORTS
from router.workers.intake import Next, StateIntake
from router.workers.listener import LeasePhase
from router.workers.state import WorkerState
from router.workers.surroundings import Surroundings
from router.workers.tokenizers import TokenizerStore
from tests.support.router_fixture import settings
from tests.support.router_parts import Heard, Parts, prepared

BLOCKS = [int(block) for block in prepared(64 * 8).block_hashes]


class Taking:
    """One worker and what takes its updates in."""

    def __init__(self, **facts: Any) -> None:
        self.parts = Parts(num_workers=0)
        self.state: WorkerState = self.parts.add("w0", **facts)
        self.heard = Heard()
        tokenizers = TokenizerStore(ThreadPoolExecutor(1))
        self.intake = StateIntake(
            self.state,
            Surroundings(
                settings(),
                self.parts.sketch,
                tokenizers,
                self.parts.metrics,
                self.heard,
                Access(),
                self.parts.clock,
                Random(1),
            ),
        )

    def take(self, sequence: int = 0, *, incarnation: int = 1, status: str = "serving", **fields: Any) -> Next:
        value = convert.worker_status_to_pb(WorkerStatus(status))
        update = worker_pb2.StateUpdate(incarnation=incarnation, sequence=sequence, status=value, **fields)
        return self.intake.take(update)

    def digest(self, sequence: int, *hashes: int, **fields: Any) -> Next:
        return self.take(sequence, digest=worker_pb2.PrefixDigest(block_hashes=packed(*hashes)), **fields)

    def delta(self, sequence: int, added: list[int], evicted: list[int] | None = None, **fields: Any) -> Next:
        delta = worker_pb2.PrefixDelta(added=packed(*added), evicted=packed(*(evicted or [])))
        return self.take(sequence, delta=delta, **fields)

    @property
    def advice(self) -> tuple[str, ...]:
        return self.state.advice

    @property
    def depth(self) -> int:
        return self.parts.sketch.match(np.array(BLOCKS, dtype=np.uint64))[self.state.slot]


def packed(*hashes: int) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()


def test_digest_then_deltas_then_heartbeats() -> None:
    taking = Taking()
    assert taking.digest(5, *BLOCKS[:3]) is Next.READ
    assert taking.depth == 3
    assert taking.delta(6, BLOCKS[3:5]) is Next.READ
    assert taking.depth == 5
    assert taking.delta(7, [], BLOCKS[2:5]) is Next.READ
    assert taking.depth == 2
    assert taking.take(7) is Next.READ
    assert not taking.state.approximate


def test_the_time_between_two_reports_is_measured_while_the_worker_is_connected() -> None:
    taking = Taking()
    taking.state.connected = False
    taking.digest(1)
    taking.state.connected = True
    for pause_s in (0.1, 0.3):
        taking.parts.clock.advance(pause_s)
        taking.take(1)
    sample = taking.parts.metrics.registry.get_sample_value
    assert sample("radixfleet_router_state_gap_seconds_count") == 2
    assert sample("radixfleet_router_state_gap_seconds_sum") == pytest.approx(0.4)


@pytest.mark.parametrize("sequence", [8, 6, 5])
def test_a_gap_asks_for_a_resync_and_is_counted(sequence: int) -> None:
    """Behaviour 50: a gap in the event sequence leads to a resync."""
    taking = Taking()
    taking.digest(6, *BLOCKS[:3])
    assert taking.delta(sequence, BLOCKS[3:5]) is Next.RESYNC
    assert taking.state.approximate
    assert taking.parts.metrics.registry.get_sample_value("radixfleet_router_resyncs_total") == 1
    assert taking.digest(9, *BLOCKS[:1]) is Next.READ
    assert taking.depth == 1


def test_a_heartbeat_that_skips_numbers_is_a_gap() -> None:
    """Behaviour 50: the missing report may have been the last for a long time."""
    taking = Taking()
    taking.digest(6, *BLOCKS[:3])
    assert taking.take(7) is Next.RESYNC


def test_an_update_between_reports_that_skips_numbers_is_a_gap() -> None:
    """Behaviour 50: also the heartbeat of an engine that is silent; it is not followed until all is told again."""
    taking = Taking()
    taking.digest(6, *BLOCKS[:3])
    assert taking.take(6, coming=packed(BLOCKS[3]), between_reports=True) is Next.READ
    assert taking.take(7, coming=packed(BLOCKS[4]), between_reports=True) is Next.RESYNC
    assert taking.state.approximate
    assert taking.take(6, between_reports=True) is Next.RESYNC
    assert taking.digest(7, *BLOCKS[:1]) is Next.READ
    assert taking.depth == 1


def test_an_engine_that_says_nothing_more_has_computed_nothing_more() -> None:
    """Behaviour 45: what was booked since its last report stays booked, though that knows nothing of it."""
    taking = Taking()
    taking.digest(5)
    taking.state.book(300, 1)
    for _ in range(20):
        taking.parts.clock.advance(1.0)
        taking.take(5, between_reports=True)
        assert taking.state.view.outstanding_prompt_tokens == 300
    taking.take(5)
    assert taking.state.view.outstanding_prompt_tokens == 0


def test_a_new_incarnation_wipes_the_sketch_at_once_and_forgets_what_was_held_against_the_old() -> None:
    """Behaviour 50: a restarted worker's old entries are dropped with the first update that tells of it."""
    taking = Taking()
    taking.digest(6, *BLOCKS[:3])
    taking.state.drain_wanted = True
    for _ in range(3):
        taking.parts.clock.advance(1.0)
        taking.state.breaker.failure(sent_at_s=taking.parts.clock.now(), probe=False)
        taking.parts.clock.advance(1.0)
    assert not taking.state.breaker.admits
    taking.take(0, incarnation=2, status="loading")
    assert taking.depth == 0
    assert taking.state.breaker.admits
    assert not taking.state.drain_wanted
    assert taking.heard.gone == [taking.state]


def test_a_change_of_status_asks_for_the_facts_again() -> None:
    taking = Taking()
    taking.digest(1)
    assert taking.take(1, status="draining") is Next.ASK
    assert taking.state.view.unavailable == "draining"
    assert taking.take(1, status="draining") is Next.READ


def test_load_and_capacity_are_taken_over() -> None:
    taking = Taking()
    taking.digest(1)
    load = Load(3, 2, 500, 1000, 400)
    capacity = Capacity(6400, 16, 5, 512)
    taking.take(1, load=convert.load_to_pb(load), capacity=convert.capacity_to_pb(capacity))
    view = taking.state.view
    assert (view.running_requests, view.waiting_requests, view.outstanding_prompt_tokens) == (3, 2, 500)
    assert view.kv_tokens == 6400
    assert view.max_running_requests == 5
    assert taking.parts.sketch.capacity_blocks(taking.state.slot) == 100


def test_a_capacity_of_zeros_is_told_too() -> None:
    """Of a worker that is still loading: it has said so, which is more than having said nothing."""
    taking = Taking()
    taking.state.capacity = None
    taking.digest(1)
    assert taking.state.capacity is None
    taking.take(1, capacity=worker_pb2.Capacity())
    assert taking.state.capacity == Capacity(0, 0, 0, 0)
    taking.take(1, capacity=convert.capacity_to_pb(Capacity(6400, 16, 5, 512)))
    taking.take(1, capacity=worker_pb2.Capacity())
    assert taking.state.capacity == Capacity(0, 0, 0, 0)


def test_evictable_cache_is_no_load() -> None:
    """Only what cannot be evicted counts: a worker with a full cache and nothing to do is idle."""
    taking = Taking()
    taking.digest(1)
    taking.take(1, load=worker_pb2.Load(kv_evictable_tokens=100_000))
    assert taking.state.view.outstanding_prompt_tokens == 0
    assert taking.state.view.kv_free_tokens == 100_000


@pytest.mark.parametrize("fields", [{"block_scheme": 99}, {"block_tokens": 128}])
def test_blocks_of_another_scheme_are_not_compared(fields: dict[str, int]) -> None:
    taking = Taking(**fields)
    assert taking.digest(5, *BLOCKS[:3]) is Next.READ
    assert taking.delta(9, BLOCKS[:3]) is Next.READ
    assert taking.depth == 0
    assert taking.state.approximate


def test_lease_events_are_passed_on_in_order() -> None:
    taking = Taking()
    events = [
        worker_pb2.LeaseEvent(lease_id="a", phase=worker_pb2.LeaseEvent.PHASE_STARTED, cached_tokens=64),
        worker_pb2.LeaseEvent(lease_id="b", phase=99),  # type: ignore[arg-type]  # a phase of a later version
        worker_pb2.LeaseEvent(lease_id="a", phase=worker_pb2.LeaseEvent.PHASE_FIRST_TOKEN),
        worker_pb2.LeaseEvent(lease_id="a", phase=worker_pb2.LeaseEvent.PHASE_ENDED),
    ]
    taking.digest(1, lease_events=events)
    assert taking.heard.events == [
        ("a", LeasePhase.STARTED, 64),
        ("a", LeasePhase.FIRST_TOKEN, 0),
        ("a", LeasePhase.ENDED, 0),
    ]


def test_hashes_cut_in_the_middle_are_refused() -> None:
    taking = Taking()
    with pytest.raises(ValueError, match="buffer size"):
        taking.take(1, digest=worker_pb2.PrefixDigest(block_hashes=b"1234567"))


def test_the_worker_s_advice_is_that_of_its_last_report() -> None:
    taking = Taking()
    taking.digest(1, advice=["fewer requests"])
    assert taking.advice == ("fewer requests",)
    taking.delta(2, [])
    assert taking.advice == ()


def test_what_is_coming_counts_until_it_comes_or_goes() -> None:
    """Behaviour 51: with a digest all of it, then changes, which apply after the delta."""
    taking = Taking()
    taking.digest(5, *BLOCKS[:1], coming=packed(*BLOCKS[1:4]))
    assert taking.depth == 4
    taking.delta(6, BLOCKS[1:2], coming=packed(*BLOCKS[4:6]))
    assert taking.depth == 6
    taking.take(6, gone=packed(*BLOCKS[1:6]))
    assert taking.depth == 2, "the block that was added stays"
    taking.digest(7, *BLOCKS[:3])
    assert taking.depth == 3, "nothing is coming any more"


def test_updates_between_two_reports_bring_load_and_prompts_and_settle_nothing() -> None:
    """Behaviour 51: what another router has sent counts at once; what the engine has still to tell waits for it."""
    taking = Taking()
    taking.digest(5, *BLOCKS[:1])
    sketch, slot = taking.parts.sketch, taking.state.slot
    lease = sketch.book(slot, np.array(BLOCKS[:2], dtype=np.uint64), 128)
    sketch.receipt(lease, 64)
    sketch.end(lease)
    accepted = worker_pb2.AcceptedLoad(requests=2, prompt_tokens=700)
    for _ in range(2 * GRACE_REPORTS):
        taking.take(5, accepted=accepted, coming=packed(BLOCKS[2]), between_reports=True)
        assert (taking.state.books.running_requests, taking.state.books.outstanding_tokens) == (2, 700)
        assert sketch.blocks(slot) == 3
    for _ in range(GRACE_REPORTS):
        taking.take(5)
    assert sketch.blocks(slot) == 2, "the engine has not cached what the request computed"


@pytest.mark.parametrize("fields", [{"block_scheme": 99}, {"block_tokens": 128}])
def test_blocks_of_another_scheme_are_not_coming(fields: dict[str, int]) -> None:
    taking = Taking(**fields)
    taking.digest(5, coming=packed(*BLOCKS))
    taking.take(5, coming=packed(*BLOCKS))
    assert taking.depth == 0


def test_without_the_truth_nothing_is_coming() -> None:
    """A worker of another dialect, and one of whose reports one is missing."""
    taking = Taking()
    taking.digest(5, coming=packed(*BLOCKS[:2]))
    assert taking.take(7, coming=packed(*BLOCKS[2:4])) is Next.RESYNC
    assert taking.depth == 2

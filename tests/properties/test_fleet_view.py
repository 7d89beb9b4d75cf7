"""Columns that were updated in place say what columns made anew would say, and what the views say one by one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixfleet.types import WorkerStatus
from router.fleet_view import Columns, FleetView
from router.policies import POLICY_NAMES, make_policy
from router.policies.policy import cheapest
from router.view import RequestView, WorkerView, eligible
from tests.bench.candidate_policies import shape
from tests.support.views import request, worker

SLOTS = (3, 0, 1, 5, 2)
"""Of the workers, in the order in which they were added."""


@st.composite
def workers(draw: st.DrawFn, slot: int) -> WorkerView:
    """Figures from small sets, so that workers are often equal, full or out of order."""
    return worker(
        slot,
        running=draw(st.sampled_from([0, 1, 7, 8, 40])),
        waiting=draw(st.sampled_from([0, 0, 1, 5])),
        queued_tokens=draw(st.sampled_from([0, 0, 64, 4_000, 70_000])),
        max_running=draw(st.sampled_from([0, 8, 64])),
        kv_tokens=draw(st.sampled_from([0, 3_000, 100_000])),
        kv_protected=draw(st.sampled_from([0, 1_000, 2_900])),
        sketch_blocks=draw(st.sampled_from([0, 1, 30, 1_300])),
        last_booking=draw(st.integers(0, 3)),
        status=draw(st.sampled_from([WorkerStatus.SERVING] * 4 + [WorkerStatus.DRAINING])),
        breaker_open=draw(st.sampled_from([False] * 4 + [True])),
    )


@st.composite
def fleets(draw: st.DrawFn) -> FleetView:
    """Some workers, each replaced a few times since the view was made."""
    slots = SLOTS[: draw(st.integers(1, len(SLOTS)))]
    fleet = FleetView([draw(workers(slot)) for slot in slots])
    for place in draw(st.lists(st.integers(0, len(slots) - 1), max_size=6)):
        fleet.replace(place, draw(workers(slots[place])))
        if draw(st.booleans()):  # some sums are made when they are first asked for, and kept from then on
            assert len(fleet.columns.crowding) == len(fleet.columns.fill_up_to(0.0))
            assert fleet.columns.most_place >= fleet.columns.place[0]
            assert fleet.columns.queue_at(0) == min(fleet.columns.queue)
            assert fleet.serving.count <= len(fleet)
    return fleet


@st.composite
def requests(draw: st.DrawFn) -> RequestView:
    """A prompt of up to 100 blocks that workers hold parts of."""
    prompt_tokens = draw(st.sampled_from([1, 63, 64, 640, 2_000, 6_400]))
    blocks = prompt_tokens // 64
    depths = [draw(st.sampled_from(sorted({0, blocks // 2, blocks}))) for _ in range(6)]
    users = {slot: draw(st.integers(1, 20)) for slot in range(6) if depths[slot] and draw(st.booleans())}
    return RequestView(prompt_tokens, request(prompt_tokens).block_hashes, np.array(depths), users)


def in_order(columns: Columns) -> list[float]:
    """Their queues, the shortest first."""
    return [columns.queue_at(rank) for rank in range(len(columns))]


@given(fleets())
@settings(deadline=None)
def test_columns_updated_in_place_are_those_made_anew(fleet: FleetView) -> None:
    new, old = FleetView(list(fleet)).columns, fleet.columns
    for name in ("slots", "queue", "requests", "held", "fill", "room", "place", "crowding"):
        assert getattr(old, name).tolist() == getattr(new, name).tolist(), name
    for most in (0.0, 0.02, 10.0):
        assert old.fill_up_to(most).tolist() == [min(each.cache_fill, most) for each in fleet]
    for name in ("queued", "in_flight", "filled", "least_requests", "least_room", "most_place", "num_idle"):
        assert getattr(old, name) == getattr(new, name), name
    assert new.num_idle == sum(not each.outstanding_prompt_tokens for each in fleet)
    assert in_order(old) == in_order(new) == sorted(new.queue.tolist())


@given(fleets(), requests())
@settings(deadline=None)
def test_columns_let_the_same_workers_through_as_views(fleet: FleetView, view: RequestView) -> None:
    through, expected = fleet.eligible(view), eligible(view, list(fleet))
    assert through.slots.tolist() == [each.slot for each in expected]
    assert in_order(through) == sorted(each.outstanding_prompt_tokens for each in expected)


def has_place(worker: WorkerView, prompt_tokens: int) -> bool:
    """A request could run there at once, or would be the only one that waits for memory."""
    return not worker.places_short and (worker.kv_free_tokens >= prompt_tokens or not worker.waiting_requests)


@given(fleets(), st.sampled_from([1, 640, 2_500]))
@settings(deadline=None)
def test_a_fleet_is_saturated_when_some_serve_and_none_has_a_place(fleet: FleetView, prompt_tokens: int) -> None:
    serving = [each for each in fleet if not each.unavailable]
    full = bool(serving) and not any(has_place(each, prompt_tokens) for each in serving)
    assert fleet.is_saturated(prompt_tokens) == full


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(fleet=fleets(), view=requests(), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_a_policy_ranks_a_fleet_as_it_ranks_a_list(name: str, fleet: FleetView, view: RequestView, seed: int) -> None:
    ours, plain = (make_policy(name).rank(view, given, Random(seed)) for given in (fleet, list(fleet)))
    assert (ours.slot, ours.reason, dict(ours.costs)) == (plain.slot, plain.reason, dict(plain.costs))
    if ours.most_matched_blocks is not None:
        assert ours.most_matched_blocks == max((view.matched_blocks[slot] for slot in ours.costs), default=None)


@given(fleets(), requests(), st.integers(0, 3))
@settings(deadline=None)
def test_the_default_chooses_the_cheapest_and_among_equals_one_with_few_requests(
    fleet: FleetView, view: RequestView, seed: int
) -> None:
    ranking = make_policy("min_cost").rank(view, fleet, Random(seed))
    candidates = eligible(view, list(fleet))
    chosen = cheapest(candidates, dict(ranking.costs), Random(seed)).slot if candidates else None
    assert ranking.slot == chosen


@given(fleets(), requests())
@settings(deadline=None)
def test_the_default_costs_what_its_formula_says(fleet: FleetView, view: RequestView) -> None:
    """The formula in plain words, worker by worker, is kept with the candidates that it was compared with."""
    written, computed = (policy.rank(view, fleet, Random(0)).costs for policy in (shape(), make_policy("min_cost")))
    assert dict(computed) == pytest.approx(dict(written), rel=1e-9, abs=1e-6)


@given(fleets())
@settings(deadline=None)
def test_the_columns_of_those_that_serve_last_and_stay_true(fleet: FleetView) -> None:
    """A worker that is out costs the choices among the others nothing: they are not picked anew for each."""
    serving = FleetView([each for each in fleet if not each.unavailable]).columns
    for name in ("slots", "queue", "requests", "held", "fill", "room", "place"):
        assert getattr(fleet.serving, name).tolist() == getattr(serving, name).tolist(), name
    assert (fleet.serving.queued, fleet.serving.in_flight) == (serving.queued, serving.in_flight)
    assert fleet.serving is fleet.serving

"""Columns that were updated in place say what columns made anew would say, and what the views say one by one."""

from __future__ import annotations

from dataclasses import replace
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
from tests.support.views import change, request, worker

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
    """Some workers, each changed a few times since the view was made, looked at in between or not."""
    slots = SLOTS[: draw(st.integers(1, len(SLOTS)))]
    views = [draw(workers(slot)) for slot in slots]
    fleet = FleetView(views)
    for place in draw(st.lists(st.integers(0, len(slots) - 1), max_size=6)):
        views[place] = draw(workers(slots[place]))
        change(fleet, place, views[place])
        if draw(st.booleans()):  # some sums are made when they are first asked for, and kept from then on
            look_at(fleet.columns)
            look_at(fleet.serving)
        if draw(st.booleans()):
            assert list(fleet) == views
    assert list(fleet) == views
    return fleet


def look_at(columns: Columns) -> None:
    """Have everything made that is kept."""
    if len(columns):
        assert len(columns.crowding) == len(columns.fill_up_to(0.0)) == len(columns)
        assert columns.least_room <= columns.room[0]
        assert columns.most_place >= columns.place[0]
        assert columns.queue_at(0) == min(columns.queue)
        assert columns.num_idle <= len(columns)


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


def assert_equal(kept: Columns, anew: Columns) -> None:
    """Each figure of them, and each sum."""
    for name in ("slots", "queue", "requests", "held", "fill", "room", "place"):
        assert getattr(kept, name).tolist() == getattr(anew, name).tolist(), name
    for name in ("queued", "in_flight", "filled"):
        assert getattr(kept, name) == getattr(anew, name), name
    if len(anew):
        assert kept.crowding.tolist() == anew.crowding.tolist()
        for name in ("least_requests", "least_room", "most_place", "num_idle"):
            assert getattr(kept, name) == getattr(anew, name), name
    assert in_order(kept) == in_order(anew) == sorted(anew.queue.tolist())


def is_idle(worker: WorkerView) -> bool:
    """Nothing waits there, a request could run at once, and fewer run than a burst has siblings."""
    free = not (worker.outstanding_prompt_tokens or worker.waiting_requests or worker.places_short)
    return free and not worker.unavailable and worker.requests_in_flight < 8


@given(fleets())
@settings(deadline=None)
def test_columns_updated_in_place_are_those_made_anew(fleet: FleetView) -> None:
    new, old = FleetView(list(fleet)).columns, fleet.columns
    assert_equal(old, new)
    for most in (0.0, 0.02, 10.0):
        assert old.fill_up_to(most).tolist() == [min(each.cache_fill, most) for each in fleet]
    assert new.num_idle == sum(map(is_idle, fleet))


@given(fleets())
@settings(deadline=None)
def test_columns_let_the_same_workers_through_as_views(fleet: FleetView) -> None:
    through, expected = fleet.serving, eligible(list(fleet))
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
    candidates = eligible(list(fleet))
    chosen = cheapest(candidates, dict(ranking.costs), Random(seed)).slot if candidates else None
    assert ranking.slot == chosen


@given(fleets(), requests())
@settings(deadline=None)
def test_the_default_costs_what_its_formula_says(fleet: FleetView, view: RequestView) -> None:
    """The formula in plain words, worker by worker, is kept with the candidates that it was compared with."""
    written, computed = (policy.rank(view, fleet, Random(0)).costs for policy in (shape(), make_policy("min_cost")))
    assert dict(computed) == pytest.approx(dict(written), rel=1e-9, abs=1e-6)


@given(fleets(), st.data())
@settings(deadline=None)
def test_the_columns_of_those_that_serve_last_and_stay_true(fleet: FleetView, data: st.DataObject) -> None:
    """A worker that is out costs the choices among the others nothing: they are not picked anew for each."""
    kept = fleet.serving
    assert_equal(kept, serving(fleet))
    positions = [position for position, each in enumerate(fleet) if not each.unavailable]
    if not positions:
        return
    position = data.draw(st.sampled_from(positions))
    slot = fleet[position].slot
    change(fleet, position, replace(data.draw(workers(slot)), status=WorkerStatus.SERVING, breaker_open=False))
    assert fleet.serving is kept
    assert_equal(kept, serving(fleet))
    change(fleet, position, worker(slot, breaker_open=True))
    assert slot not in fleet.serving.slots
    assert_equal(fleet.serving, serving(fleet))


def serving(fleet: FleetView) -> Columns:
    """Made anew."""
    return FleetView([each for each in fleet if not each.unavailable]).columns

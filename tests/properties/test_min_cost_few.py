"""The default policy ranks few workers one by one, and many by columns: the same costs, choice, reason and draws."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import min_cost
from router.policies.min_cost import MinCost
from router.view import Ranking, RequestView, WorkerView
from tests.support.views import request, worker

workers = st.lists(
    st.builds(
        lambda running, waiting, queue, blocks, limit: {
            "running": running,
            "waiting": waiting,
            "queued_tokens": queue,
            "sketch_blocks": blocks,
            "max_running": limit,
            "kv_tokens": 100_000,
        },
        st.integers(0, 40),
        st.integers(0, 3),
        st.one_of(st.just(0), st.integers(0, 50_000)),
        st.one_of(st.just(0), st.integers(0, 2000)),
        st.sampled_from([0, 4, 64]),
    ),
    min_size=1,
    max_size=min_cost.FEW,
)


def by_columns(view: RequestView, fleet: list[WorkerView], random: Random) -> Ranking:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(min_cost, "FEW", 0)
        return MinCost().rank(view, fleet, random)


@given(workers, st.data(), st.integers(65, 40_000), st.integers(0, 2**32))
def test_few_workers_are_ranked_as_many_are(
    fields: list[dict[str, int]], data: st.DataObject, prompt_tokens: int, seed: int
) -> None:
    fleet = [worker(slot, **each) for slot, each in enumerate(fields)]
    depth = st.integers(0, (prompt_tokens - 1) // 64)
    matched = data.draw(st.lists(depth, min_size=len(fleet), max_size=len(fleet)))
    if data.draw(st.booleans()):
        matched = [max(matched) * (blocks > 0) for blocks in matched]  # several hold most
    users = data.draw(st.dictionaries(st.integers(0, len(fleet) - 1), st.integers(0, 40)))
    view = replace(request(prompt_tokens, matched), users=users)
    few, many = Random(seed), Random(seed)
    one, other = MinCost().rank(view, fleet, few), by_columns(view, fleet, many)
    assert dict(one.costs) == dict(other.costs)
    assert (one.slot, one.reason, one.most_matched_blocks) == (other.slot, other.reason, other.most_matched_blocks)
    assert few.random() == many.random()

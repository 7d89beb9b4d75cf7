"""Whatever router and workers counted, the four shares of a hit split are parts of one whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixfleet.rates import PromptTokens, hit_split

counts = st.integers(0, 10**12)


@given(asked=st.integers(1, 10**12), reachable=counts, predicted=counts, actual=counts)
def test_the_shares_are_never_negative_and_make_one(asked: int, reachable: int, predicted: int, actual: int) -> None:
    split = hit_split(PromptTokens(asked, reachable, predicted, actual, abs(predicted - actual)))
    assert split is not None
    shares = (split.hit, split.index, split.routing, split.workload)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert sum(shares) == pytest.approx(1.0)
    assert split.hit == pytest.approx(min(actual / asked, 1.0))


@given(asked=st.integers(1, 10**6), parts=st.tuples(*[st.integers(0, 10**6)] * 3).map(sorted))
def test_counts_that_agree_are_taken_as_they_are(asked: int, parts: list[int]) -> None:
    """Cached of what was predicted, of what was reachable, of what was asked."""
    actual, predicted, reachable = (min(part, asked) for part in parts)
    split = hit_split(PromptTokens(asked, reachable, predicted, actual, predicted - actual))
    assert split is not None
    assert split.index * asked == pytest.approx(predicted - actual)
    assert split.routing * asked == pytest.approx(reachable - predicted)
    assert split.workload * asked == pytest.approx(asked - reachable)

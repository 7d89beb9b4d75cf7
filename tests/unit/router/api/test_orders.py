"""Orders to workers that make no sense."""

from __future__ import annotations

import pytest

from radixfleet.errors import InvalidRequest
from router.api.orders import check_grace


@pytest.mark.parametrize("grace_s", [None, 0.0, 30.0])
def test_a_grace_may_be_left_to_the_worker(grace_s: float | None) -> None:
    check_grace(grace_s)


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf")])
def test_a_grace_is_a_time(grace_s: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_grace(grace_s)
    assert caught.value.field == "grace_s"

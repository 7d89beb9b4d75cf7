"""Parts of a fleet on Ray die under load: what is lost, and that nothing is left over.

All scenes, and their table, are `python -m tests.ray.chaos`; here are those that Ray has the largest part in.
"""

from __future__ import annotations

import pytest

from tests.ray.chaos import run
from tests.support.ray_host import why_not

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]


def test_what_dies_under_load_comes_back_and_only_its_own_streams_are_lost() -> None:
    """Behaviour 61. A raylet, then the supervisor."""
    raylet, supervisor = run(["raylet", "supervisor"], requests_per_s=3.0, window_s=3.0)
    assert raylet.orphans == supervisor.orphans == 0
    assert raylet.lost == raylet.lost_streaming, "a request without a token is tried elsewhere"
    assert supervisor.lost == 0
    assert raylet.sent > 0
    assert supervisor.notice_s is None

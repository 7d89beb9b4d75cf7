from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from radixfleet.errors import InternalError
from radixfleet.types import FinishReason
from router.dialects.finish_reasons import finish_reason


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("STOP", FinishReason.STOP),
        ("tool_calls", FinishReason.STOP),
        ("max_tokens", FinishReason.LENGTH),
        ("abort: the client left", FinishReason.ABORT),
        ("content_filter", FinishReason.ABORT),
    ],
)
def test_words_that_are_known(told: str, reason: FinishReason) -> None:
    with capture_logs() as logs:
        assert finish_reason(told) is reason
    assert not logs


def test_an_unknown_word_is_stop_and_is_told_once() -> None:
    with capture_logs() as logs:
        for word in ("made up here", "made up here", "and another one"):
            assert finish_reason(word) is FinishReason.STOP
    assert [entry["finish_reason"] for entry in logs] == ["made up here", "and another one"]


@pytest.mark.parametrize("told", ["error", "network_error", "Failed: out of memory"])
def test_a_word_that_says_failure_is_one(told: str) -> None:
    """Behaviour 53: never a silent stop."""
    with pytest.raises(InternalError, match=told):
        finish_reason(told)

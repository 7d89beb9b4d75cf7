"""When a load on fleets is a failure."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest

from deploy.outcomes import require_answers
from loadtest.statistics import Objective, Summary, summarize
from tests.support.outcomes import outcome, result


def summary(policy: str, *, answered: int, failed: int = 0) -> Summary:
    outcomes = [outcome(0.0)] * answered + [replace(outcome(0.0), error="refused")] * failed
    return replace(summarize(result(outcomes), Objective()), policy=policy)


def test_some_answers_are_a_result() -> None:
    require_answers([summary("a", answered=1, failed=5), summary("b", answered=2)], ["refused"])


def test_none_are_a_failure_with_a_reason() -> None:
    with pytest.raises(click.ClickException, match=r"^no request was answered: refused$") as raised:
        require_answers([summary("a", answered=0, failed=2)], ["refused", "too late"])
    assert raised.value.exit_code == 1


def test_a_policy_without_any_is_named_once() -> None:
    silent = summary("b", answered=0, failed=1)
    with pytest.raises(click.ClickException, match=r"^no request was answered by b$"):
        require_answers([summary("a", answered=1), silent, silent], [])

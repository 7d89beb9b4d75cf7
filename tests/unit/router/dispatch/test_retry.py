from __future__ import annotations

from router.dispatch.retry import RetryBudget


def test_retries_are_a_share_of_the_requests_beyond_a_first_burst() -> None:
    """Behaviour 53: within a budget. When everything fails, the load grows by the ratio and does not double."""
    budget = RetryBudget(0.1)
    retried = 0
    for _ in range(1000):
        budget.earn()
        retried += budget.spend()
    assert 100 <= retried <= 110


def test_saved_retries_are_bounded() -> None:
    budget = RetryBudget(0.5)
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == 10


def test_a_ratio_of_zero_turns_retries_off() -> None:
    budget = RetryBudget(0.0)
    budget.earn()
    assert not budget.spend()

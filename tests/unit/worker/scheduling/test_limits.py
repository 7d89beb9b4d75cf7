"""Sizes: what fits, what never can, and how a step's tokens are shared."""

from __future__ import annotations

import dataclasses

import pytest

from radixfleet.clock import ManualClock
from worker.memory.advisor import Bound
from worker.runner.sim import SimRunner, SimRunnerConfig
from worker.scheduling.limits import Limits, Order

LIMITS = Limits(num_pages=101, page_size=16, max_running_requests=8, chunked_prefill_size=64, max_context_tokens=1_000)


def test_the_pool_is_counted_without_the_padding_sink() -> None:
    assert LIMITS.kv_tokens == 1_600


def test_limits_come_from_what_the_runner_says() -> None:
    config = SimRunnerConfig(
        kv_tokens=640, page_size=16, max_running_requests=3, chunked_prefill_size=48, max_context_tokens=9_999
    )
    limits = Limits.from_ready(SimRunner(config, ManualClock()).load(), order="priority")
    assert limits == Limits(
        num_pages=41,
        page_size=16,
        max_running_requests=3,
        chunked_prefill_size=48,
        max_context_tokens=640,
        order="priority",
        kv_bound=Bound.CAP,
    )


@pytest.mark.parametrize(("num_decodes", "budget"), [(0, 64), (1, 63), (48, 16), (49, 16), (64, 16), (1_000, 16)])
def test_decodes_come_out_of_the_budget_but_never_starve_prompts(num_decodes: int, budget: int) -> None:
    assert LIMITS.prefill_budget(num_decodes) == budget


@pytest.mark.parametrize(("chunk", "max_running"), [(1, 1), (64, 8), (64, 60), (7, 256), (8_192, 256)])
def test_no_step_exceeds_its_bound(chunk: int, max_running: int) -> None:
    limits = Limits(
        num_pages=2,
        page_size=1,
        max_running_requests=max_running,
        chunked_prefill_size=chunk,
        max_context_tokens=1,
    )
    largest = max(decodes + limits.prefill_budget(decodes) for decodes in range(max_running + 1))
    assert chunk <= largest <= chunk + max_running


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "says"),
    [
        (0, 1, ["empty"]),
        (5, 0, ["max_new_tokens", "0"]),
        (5, -3, ["max_new_tokens", "-3"]),
        (1_000, 1, ["1001", "1000", "--context-length"]),
        (1, 1_000, ["1001", "1000", "--context-length"]),
        (5, 99_999_999, ["99999999", "1000", "--context-length"]),
        (2**62, 2**62, ["--context-length"]),
    ],
)
def test_what_never_fits_is_refused_with_numbers_and_the_setting(
    prompt_tokens: int, max_new_tokens: int, says: list[str]
) -> None:
    """Behaviours 15, 40."""
    message = LIMITS.refusal(prompt_tokens, max_new_tokens)
    assert message is not None
    for part in says:
        assert part in message


@pytest.mark.parametrize(("prompt_tokens", "max_new_tokens"), [(1, 1), (999, 1), (1, 999), (500, 500)])
def test_what_just_fits_is_not_refused(prompt_tokens: int, max_new_tokens: int) -> None:
    """Behaviour 40: a prompt of the context length less one leaves room for one token."""
    assert LIMITS.refusal(prompt_tokens, max_new_tokens) is None


@pytest.mark.parametrize(("order", "preempts"), [("fcfs", False), ("lpm", False), ("priority", True)])
def test_only_the_order_of_priorities_preempts(order: Order, preempts: bool) -> None:
    ready = SimRunner(SimRunnerConfig(), ManualClock()).load()
    assert Limits.from_ready(ready, order=order, preempt=True).preempt is preempts


@pytest.mark.parametrize(
    ("max_context_tokens", "named", "other"),
    [(32, "--context-length", "KV pool"), (64, "--mem-fraction-static", "--context-length")],
)
def test_a_refusal_names_the_limit_that_binds(max_context_tokens: int, named: str, other: str) -> None:
    """Behaviour 15: advice on the pool would not help a request that the context is too short for, nor the reverse."""
    limits = Limits(
        num_pages=5,
        page_size=16,
        max_running_requests=1,
        chunked_prefill_size=16,
        max_context_tokens=max_context_tokens,
    )
    refusal = limits.refusal(60, 5)
    assert refusal is not None
    for part in ("60", "5", "65", named):
        assert part in refusal
    assert other not in refusal


@pytest.mark.parametrize(
    ("bound", "setting"), [(Bound.FRACTION, "--mem-fraction-static"), (Bound.CAP, "--max-total-tokens")]
)
def test_a_refusal_names_the_setting_that_bounds_the_pool(bound: Bound, setting: str) -> None:
    """Behaviour 15: the setting to change, and not one that would change nothing."""
    limits = dataclasses.replace(LIMITS, max_context_tokens=1_600, kv_bound=bound)
    refusal = limits.refusal(1_000, 1_000) or ""
    named = {name for name in ("--mem-fraction-static", "--max-total-tokens") if name in refusal}
    assert named == {setting}


def test_one_token_is_a_token() -> None:
    assert "the prompt has 1 token and" in (LIMITS.refusal(1, 100_000) or "")

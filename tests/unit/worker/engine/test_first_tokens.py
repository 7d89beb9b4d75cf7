"""Who comes while a step runs, in virtual time: the real loop and scheduler before a device with costs."""

from __future__ import annotations

from statistics import mean, median

import numpy as np
import pytest

from tests.support.virtual_engine import CPU, STEP_COST_TOKENS, Asked, Clients, VirtualEngine


def ask(clients: Clients, *, paced: bool, step_cost_tokens: int = 0) -> list[Asked]:
    asked = VirtualEngine(clients, paced=paced, step_cost_tokens=step_cost_tokens).run()
    assert len(asked) == (len(clients.arrivals_s) or clients.requests)
    assert all(len(each.tokens) == clients.new_tokens for each in asked)
    return asked


def last_s(asked: list[Asked]) -> float:
    return max(each.token_times_s[-1] for each in asked)


def mean_ttft_s(asked: list[Asked]) -> float:
    return mean(each.ttft_s for each in asked)


def test_a_request_that_comes_while_others_decode_waits_for_no_step_but_the_one_that_runs() -> None:
    """Planned at once, the step after it would be closed to it too: a step of about 20 ms more."""
    clients = Clients(prefix_tokens=0, unique_tokens=64, new_tokens=40, arrivals_s=(0.0, 0.3))
    at_once, when_due = (ask(clients, paced=paced)[1].ttft_s for paced in (False, True))
    longest_step_s = CPU.step_s + CPU.decode_token_s
    own_step_s = CPU.step_s + CPU.decode_token_s + 64 * CPU.prefill_token_s
    assert when_due < 2 * clients.way_s + longest_step_s + own_step_s + 2e-3
    assert at_once - when_due > 0.9 * longest_step_s


def test_random_arrivals_have_their_first_tokens_sooner_and_nobody_ends_later() -> None:
    arrivals_s = np.cumsum(np.random.default_rng(3).exponential(0.4, 40)).tolist()
    clients = Clients(prefix_tokens=128, new_tokens=32, concurrency=16, arrivals_s=arrivals_s)
    at_once, when_due = (ask(clients, paced=paced) for paced in (False, True))
    assert mean_ttft_s(when_due) < 0.85 * mean_ttft_s(at_once)
    assert mean(each.token_times_s[-1] for each in when_due) <= mean(each.token_times_s[-1] for each in at_once)


def test_the_device_never_waits_for_a_step_that_was_held_back() -> None:
    """What a serial engine idles in every step: planning, and the way."""
    clients = Clients(requests=16, new_tokens=32)
    serial_s, paced_s = (last_s(ask(clients, paced=paced)) for paced in (False, True))
    assert paced_s < 1.01 * serial_s


def test_a_burst_has_its_first_tokens_in_turn_and_loses_no_throughput() -> None:
    """In a closed loop, as many come together as have ended together."""
    clients = Clients()
    together = ask(clients, paced=True)
    in_turn = ask(clients, paced=True, step_cost_tokens=STEP_COST_TOKENS)
    assert median(each.ttft_s for each in in_turn) < 0.95 * median(each.ttft_s for each in together)
    assert last_s(in_turn) < 1.01 * last_s(together)


def test_tokens_do_not_depend_on_when_steps_are_planned() -> None:
    clients = Clients(requests=12, new_tokens=8)
    plain, in_turn = ask(clients, paced=False), ask(clients, paced=True, step_cost_tokens=STEP_COST_TOKENS)
    assert [each.tokens for each in plain] == [each.tokens for each in in_turn]


@pytest.mark.parametrize(
    "clients",
    [Clients(120, 32, 0, 64, 2), Clients(24, 24, 128, 64, 4), Clients(48, 8, 128, 64, 32)],
    ids=["2 tokens each", "4 tokens each", "32 tokens each"],
)
def test_requests_that_end_together_cost_an_overlapped_engine_hardly_a_step(clients: Clients) -> None:
    """Their rows are held for a step more, beside which their successors find rows of their own."""
    steps = {}
    for overlap in (False, True):
        engine = VirtualEngine(
            clients, paced=overlap, overlap=overlap, step_cost_tokens=STEP_COST_TOKENS, max_running=8
        )
        engine.run()
        steps[overlap] = len(engine.executor.plans)
    assert steps[True] <= steps[False] + 1

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixfleet import blocks
from radixfleet.types import Load
from router.dispatch.lease import Lease, Verdict
from tests.support.router_parts import Parts, prepared, tokens


def metric(parts: Parts, name: str) -> float:
    value = parts.metrics.registry.get_sample_value(f"radixfleet_router_{name}")
    assert value is not None
    return value


def test_a_lease_books_what_is_not_cached_and_the_receipt_corrects_it() -> None:
    parts = Parts(1)
    worker = parts.workers[0]
    lease = parts.chooser.choose(prepared(300))
    assert worker.view.outstanding_prompt_tokens == 300
    assert worker.view.running_requests == 1
    lease.started(128)
    assert worker.view.outstanding_prompt_tokens == 172
    lease.first_token()
    assert worker.view.outstanding_prompt_tokens == 0
    assert worker.view.running_requests == 1
    lease.settle(Verdict.ANSWERED)
    assert worker.view.running_requests == 0
    parts.check_settled()


def test_the_four_counters_of_prompt_tokens_are_added_together() -> None:
    parts = Parts(1)
    first = parts.chooser.choose(prepared(300))
    first.started(0)
    first.settle(Verdict.ANSWERED)
    second = parts.chooser.choose(prepared(300))
    assert second.decision.predicted_cached_tokens == 256
    second.started(192)
    second.started(192)
    second.settle(Verdict.ANSWERED)
    never_started = parts.chooser.choose(prepared(300))
    never_started.settle(Verdict.FAILED)
    counted = [metric(parts, f"prompt_tokens_{name}_total") for name in ("asked", "reachable", "predicted", "actual")]
    assert counted == [600, 256, 256, 192]
    parts.check_settled()


def counts(parts: Parts) -> list[float]:
    return [metric(parts, f"prompt_tokens_{name}_total") for name in ("asked", "reachable", "predicted", "actual")]


def test_an_engine_that_tells_at_the_end_is_counted_then_and_in_our_own_tokens() -> None:
    parts = Parts(1)
    lease = parts.chooser.choose(prepared(300))
    lease.started(None)
    assert parts.workers[0].view.outstanding_prompt_tokens == 300
    lease.first_token()
    assert counts(parts) == [0, 0, 0, 0]
    lease.receipt(100, 200)  # of 200 tokens of its own
    lease.receipt(100, 200)
    assert counts(parts) == [300, 0, 0, 150]
    lease.settle(Verdict.ANSWERED)
    parts.check_settled()


def test_an_engine_that_never_tells_is_not_counted() -> None:
    parts = Parts(1)
    lease = parts.chooser.choose(prepared(300))
    lease.started(None)
    lease.first_token()
    lease.settle(Verdict.ANSWERED)
    assert counts(parts) == [0, 0, 0, 0]
    assert parts.sketch.match(prepared(300).block_hashes)[0] == 4, "what it computed is taken to be there"


def test_an_engine_that_made_no_token_and_tells_nothing_has_the_prompt() -> None:
    """It ended the answer at once, and had computed the prompt for that."""
    parts = Parts(1)
    lease = parts.chooser.choose(prepared(300))
    lease.started(None)
    lease.settle(Verdict.ANSWERED)
    assert parts.sketch.match(prepared(300).block_hashes)[0] == 4
    parts.check_settled()


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.FAILED])
def test_an_engine_that_broke_off_before_a_token_and_tells_nothing_has_nothing(verdict: Verdict) -> None:
    """It may send the head of its answer while the prompt waits."""
    parts = Parts(1)
    lease = parts.chooser.choose(prepared(300))
    lease.started(None)
    lease.settle(verdict)
    assert parts.sketch.match(prepared(300).block_hashes)[0] == 0
    parts.check_settled()


def test_what_is_short_by_less_than_a_block_of_the_engine_is_not_held_against_it() -> None:
    parts = Parts(1)
    for cached, left in ((300 - 128, 4), (0, 0)):
        first = parts.chooser.choose(prepared(300))
        first.started(None)
        first.first_token()
        first.settle(Verdict.ANSWERED)
        second = parts.chooser.choose(prepared(300))
        assert second.decision.predicted_cached_tokens == 256
        second.started(None)
        second.receipt(cached, 300)
        second.settle(Verdict.FAILED)
        assert parts.sketch.capacity_blocks(0) >= 1562 - (4 - left)
        assert (parts.sketch.capacity_blocks(0) == 1562) is (left == 4)


def test_the_next_turn_of_a_chat_is_expected_where_the_answer_was_generated() -> None:
    parts = Parts(2)
    prompt = tokens(100)
    lease = parts.chooser.choose(prepared(prompt))
    lease.started(0)
    output = tokens(92, first=500)
    lease.settle(Verdict.ANSWERED, output)
    # 100 + 92 tokens are 3 whole blocks, but the last token was never computed.
    next_turn = prepared(np.concatenate([prompt, output, tokens(40, first=200)]))
    again = parts.chooser.choose(next_turn)
    assert again.worker is lease.worker
    assert again.decision.predicted_cached_tokens == 2 * blocks.BLOCK_TOKENS
    again.settle(Verdict.UNKNOWN)
    parts.check_settled()


def test_a_request_that_never_started_leaves_no_blocks_behind() -> None:
    parts = Parts(1)
    parts.chooser.choose(prepared(300)).settle(Verdict.FAILED)
    assert parts.sketch.num_blocks == 0


def test_settling_twice_does_nothing() -> None:
    parts = Parts(1)
    lease = parts.chooser.choose(prepared(300))
    lease.settle(Verdict.ANSWERED)
    lease.settle(Verdict.FAILED)
    lease.first_token()
    lease.started(10)
    parts.check_settled()


def test_a_lease_outlives_its_worker() -> None:
    parts = Parts(1)
    lease = parts.chooser.choose(prepared(300))
    parts.sketch.detach(lease.worker.slot)
    lease.worker.removed = True
    other = parts.sketch.attach()
    lease.started(0)
    lease.settle(Verdict.ANSWERED, tokens(100))
    assert parts.sketch.blocks(other) == 0
    assert lease.worker.books.own_requests == 0
    assert parts.sketch.open_leases == 0


class Fuzz:
    """Requests that go on in any order, on workers that restart and break meanwhile."""

    def __init__(self) -> None:
        self.parts = Parts(3)
        self.open: list[Lease] = []

    def step(self, action: str, number: int) -> None:
        act: Any = getattr(self, action)
        act(number)
        for worker in self.parts.workers:
            open_here = [lease for lease in self.open if lease.worker is worker]
            assert worker.books.own_requests == len(open_here)
            assert 0 <= worker.books.own_tokens <= sum(lease.request.prompt_tokens for lease in open_here)
            assert worker.view.outstanding_prompt_tokens >= 0
        assert self.parts.sketch.open_leases == len(self.open)

    def choose(self, number: int) -> None:
        if any(worker.breaker.admits for worker in self.parts.workers):
            self.open.append(self.parts.chooser.choose(prepared(tokens(64 + number, first=number % 3))))

    def start(self, number: int) -> None:
        if self.open:
            lease = self.open[number % len(self.open)]
            lease.started(min(number, lease.request.prompt_tokens - 1))

    def token(self, number: int) -> None:
        if self.open:
            self.open[number % len(self.open)].first_token()

    def end(self, number: int) -> None:
        if self.open:
            lease = self.open.pop(number % len(self.open))
            lease.settle(list(Verdict)[number % 3], tokens(number % 150))

    def report(self, number: int) -> None:
        load = Load(running_requests=number % 4, outstanding_prompt_tokens=number)
        self.parts.workers[number % 3].report(load)

    def restart(self, number: int) -> None:
        worker = self.parts.workers[number % 3]
        self.parts.sketch.wipe(worker.slot)
        worker.restarted()

    def wait(self, number: int) -> None:
        self.parts.clock.advance(number / 20)


ACTIONS = ["choose", "choose", "start", "token", "end", "report", "restart", "wait"]


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 400)), max_size=50))
def test_every_counter_returns_to_zero(steps: list[tuple[str, int]]) -> None:
    """Behaviour 44: after any mix of success, cancel, error and timeout, in any order; and none goes below zero."""
    fuzz = Fuzz()
    for action, number in steps:
        fuzz.step(action, number)
    while fuzz.open:
        fuzz.step("end", len(fuzz.open))
    fuzz.parts.check_settled()
    fuzz.parts.clock.advance(100.0)
    for worker in fuzz.parts.workers:
        worker.report(Load())
        assert worker.view.outstanding_prompt_tokens == 0
        assert worker.view.running_requests == 0
        assert worker.breaker.admits

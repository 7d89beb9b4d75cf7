"""How long requests wait for their tokens, in virtual time, with two steps in flight as in an overlapped engine."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest

from radixfleet.clock import ManualClock
from tests.support.sim_worker import make_submit
from worker.core.step import StepPlan
from worker.runner.sim import CostModel, SimRunner, SimRunnerConfig
from worker.scheduling.limits import Limits, Order
from worker.scheduling.scheduler import Scheduler

COST = CostModel()
LONG = 16_384


class TimedWorker:
    """A scheduler and a device whose steps take as long as `COST` says; notes when each token was computed."""

    def __init__(self, chunk: int, *, max_running: int = 32, order: Order = "fcfs") -> None:
        self.clock = ManualClock()
        config = SimRunnerConfig(
            kv_tokens=2**20, max_running_requests=max_running, chunked_prefill_size=chunk, cost=COST
        )
        self.runner = SimRunner(config, self.clock)
        self.scheduler = Scheduler(Limits.from_ready(self.runner.load(), order=order), self.clock)
        self.token_times_s: dict[int, list[float]] = defaultdict(list)
        self._launched: deque[StepPlan] = deque()

    def submit(self, uid: int, prompt: np.ndarray, max_new_tokens: int) -> None:
        self.scheduler.submit(make_submit(uid, prompt, max_new_tokens))

    def turn(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self._launched.append(plan)
        if plan is None or len(self._launched) == 2:
            result = self.runner.run(self._launched.popleft())
            self.scheduler.commit(result)
            outputs = self.scheduler.drain()
            for output in outputs.outputs if outputs is not None else ():
                self.token_times_s[output.uid].append(result.ended_s)

    def turn_until_answered(self, uid: int) -> float:
        """Turn until a request has its first token; when that was."""
        while not self.token_times_s[uid]:
            self.turn()
        return self.token_times_s[uid][0]


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32_000, length)


def long_prompt_beside_running(chunk: int) -> tuple[float, float]:
    """The longest pause of eight running requests while a long prompt is computed, and the prompt's time, in s."""
    worker = TimedWorker(chunk)
    for uid in range(8):
        worker.submit(uid, prompt(uid, 64), 4_000)
    worker.turn_until_answered(7)
    arrived_s = worker.clock.now()
    worker.submit(99, prompt(99, LONG), 1)
    answered_s = worker.turn_until_answered(99)
    pauses = [float(np.diff(worker.token_times_s[uid]).max()) for uid in range(8)]
    return max(pauses), answered_s - arrived_s


@pytest.mark.parametrize("chunk", [256, 1024, 4096])
def test_running_requests_wait_for_one_chunk_of_a_long_prompt(chunk: int) -> None:
    """Behaviour 21: a 16k-token prompt costs the running ones no more between two tokens than one chunk of it costs."""
    pause_s, _ = long_prompt_beside_running(chunk)
    contexts = 8 * (64 + LONG // chunk + 64)
    one_step_s = COST.step_s + 8 * COST.decode_token_s + contexts * COST.context_token_s
    assert one_step_s < pause_s <= one_step_s + chunk * COST.prefill_token_s


def test_the_chunk_size_trades_smoothness_for_the_prompts_time() -> None:
    figures = [long_prompt_beside_running(chunk) for chunk in (256, 1024, 4096)]
    pauses_s, prompt_times_s = zip(*figures, strict=True)
    assert list(pauses_s) == sorted(pauses_s)
    assert list(prompt_times_s) == sorted(prompt_times_s, reverse=True)


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
def test_a_short_request_waits_a_bounded_time_in_a_flood_of_long_prompts(order: Order) -> None:
    """It waits for what was there before it. What comes later, twice as fast as the device can do it, does not count.

    With lpm the flood shares a cached prefix, so that each of it would be preferred: `max_overtakes` of them are.
    """
    worker = TimedWorker(2_048, max_running=4, order=order)
    shared = prompt(0, LONG // 2)
    worker.submit(0, shared, 1)
    worker.turn_until_answered(0)
    worker.scheduler.drain()
    num_submitted = 1

    def flood(until_s: float) -> None:
        nonlocal num_submitted
        while num_submitted * one_prompt_s / 2 <= until_s:
            tail = prompt(num_submitted, LONG // 2)
            worker.submit(num_submitted, np.concatenate([shared, tail]), 2)
            num_submitted += 1

    one_prompt_s = LONG // 2 * COST.prefill_token_s + 8 * COST.step_s
    while num_submitted < 10:
        flood(worker.clock.now())
        worker.turn()
    num_before = num_submitted
    arrived_s, ahead = worker.clock.now(), worker.scheduler.load().waiting_requests + 4
    worker.submit(10_000, prompt(10_000, 32), 1)
    while not worker.token_times_s[10_000]:
        flood(worker.clock.now())
        worker.turn()
    waited_s = worker.token_times_s[10_000][0] - arrived_s
    may_pass = 0 if order == "fcfs" else worker.scheduler.limits.max_overtakes
    assert waited_s <= (ahead + may_pass + 1) * one_prompt_s * 1.1
    assert num_submitted - num_before > ahead, "the flood went on"

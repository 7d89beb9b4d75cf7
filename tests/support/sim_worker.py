"""A scheduler and a simulated runner, driven by hand: each act of the engine's loop is one call, checked afterwards.

`SimWorker` keeps what the front would have been told, and its own books of what launched steps read and write, so
that a slot that gets into other hands too early is noticed when it is planned, whatever the scheduler's own
invariants say. `reference` computes the tokens of a request from nothing but its prompt and parameters, in plain
integers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from radixfleet.clock import ManualClock
from radixfleet.types import FinishReason
from worker.core.logits import TokenLogprobs
from worker.core.messages import Ended, Submit
from worker.core.step import StepPlan
from worker.runner.sim import SimRunner, SimRunnerConfig
from worker.runner.sim_model import logprob
from worker.scheduling.limits import Limits, Order
from worker.scheduling.scheduler import Scheduler

MASK = (1 << 64) - 1


def make_submit(
    uid: int,
    prompt: Sequence[int] | np.ndarray,
    max_new_tokens: int = 4,
    *,
    namespace: tuple[str, ...] = ("m",),
    temperature: float = 0.0,
    seed: int = 0,
    min_new_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    priority: int = 0,
    **more: Any,
) -> Submit:
    """A request with the defaults that most tests want: greedy, no stop tokens."""
    return Submit(
        uid=uid,
        token_ids=np.asarray(prompt, dtype=np.int32),
        namespace=namespace,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=seed,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_token_ids=stop_token_ids,
        priority=priority,
        **more,
    )


def reference(submit: Submit, vocab_size: int) -> tuple[list[int], FinishReason]:
    """The tokens that `submit` must give, and why it ends, when nothing interrupts it."""
    tokens = submit.token_ids.tolist()
    prompt_tokens = len(tokens)
    chain = sum(_mix(token, position) for position, token in enumerate(tokens)) & MASK
    salt = 0 if submit.temperature == 0.0 else _mix(submit.seed, 1)
    outputs: list[int] = []
    while True:
        token = _mix((chain + salt) & MASK, len(tokens)) % vocab_size
        if len(outputs) < submit.min_new_tokens:
            allowed = (t % vocab_size for t in range(token, token + vocab_size))
            token = next((t for t in allowed if t not in submit.stop_token_ids), token)
        may_stop = len(outputs) >= submit.min_new_tokens
        chain = (chain + _mix(token, prompt_tokens + len(outputs))) & MASK
        tokens.append(token)
        outputs.append(token)
        if may_stop and token in submit.stop_token_ids:
            return outputs, FinishReason.STOP
        if len(outputs) == submit.max_new_tokens:
            return outputs, FinishReason.LENGTH


def _mix(value: int, salt: int) -> int:
    mixed = (value * 0x9E3779B97F4A7C15 + (salt + 1) * 0xD1B54A32D192ED03) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


@dataclass
class Told:
    """What the front was told of one request."""

    cached_tokens: int | None = None
    admissions: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    """Of the prompt's tokens from position 1 on."""
    ended: Ended | None = None


class SimWorker:
    """See the head of the module."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_running: int = 8,
        chunk: int = 32,
        max_context: int | None = None,
        vocab_size: int = 50,
        order: Order = "fcfs",
        preempt: bool = False,
        max_overtakes: int = 64,
        shared_prefix_tokens: int = 64,
        step_cost_tokens: int = 0,
        check_each_act: bool = True,
    ) -> None:
        """`num_pages`: usable ones, without the padding sink."""
        kv_tokens = num_pages * page_size
        self.vocab_size = vocab_size
        self.clock = ManualClock()
        config = SimRunnerConfig(
            vocab_size=vocab_size,
            kv_tokens=kv_tokens,
            page_size=page_size,
            max_running_requests=max_running,
            chunked_prefill_size=chunk,
            max_context_tokens=max_context or kv_tokens,
            cost=None,
            verify=True,
        )
        self.runner = SimRunner(config, self.clock)
        ready = self.runner.load()
        self.limits = Limits(
            num_pages=num_pages + 1,
            page_size=page_size,
            max_running_requests=max_running,
            chunked_prefill_size=chunk,
            max_context_tokens=ready.max_context_tokens,
            order=order,
            preempt=preempt,
            max_overtakes=max_overtakes,
            shared_prefix_tokens=shared_prefix_tokens,
            step_cost_tokens=step_cost_tokens,
        )
        self.scheduler = Scheduler(self.limits, self.clock)
        self.launched: deque[StepPlan] = deque()
        self.submits: dict[int, Submit] = {}
        self.told: dict[int, Told] = {}
        self.plans: list[StepPlan] = []
        self._slots_of_row: dict[int, np.ndarray] = {}
        self._touched: deque[dict[int, np.ndarray]] = deque()
        self._check_each_act = check_each_act

    def submit(self, submit: Submit) -> None:
        self.submits[submit.uid] = submit
        self.told[submit.uid] = Told()
        for child in submit.children:
            self.submits[child.uid] = msgspec.structs.replace(
                submit, uid=child.uid, seed=child.seed, children=(), prompt_logprobs=None
            )
            self.told[child.uid] = Told()
        self.scheduler.submit(submit)
        self._after()

    def abort(self, uid: int) -> None:
        self.scheduler.abort(uid)
        self._after()

    def flush(self) -> tuple[int, int]:
        flushed = self.scheduler.flush()
        self._after()
        return flushed

    def launch(self) -> StepPlan | None:
        """Plan a step and put it behind those in flight."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._guard(plan)
            assert plan.num_sequences <= self.limits.max_running_requests
            self.plans.append(plan)
            self.launched.append(plan)
        self._after()
        return plan

    def settle(self) -> None:
        """Compute the oldest launched step and commit its result."""
        self.scheduler.commit(self.runner.run(self.launched.popleft()))
        self._touched.popleft()
        self._after()

    def settle_all(self) -> None:
        while self.launched:
            self.settle()

    def step(self, *, in_flight: int = 1) -> None:
        """One turn of a loop that keeps `in_flight` steps launched (1: serial)."""
        plan = self.launch()
        if self.launched and (plan is None or len(self.launched) >= in_flight):
            self.settle()
        elif plan is None:
            assert not self.scheduler.has_work, "nothing in flight, nothing planned, and yet there is work"

    def run(self, *, in_flight: int = 1, max_steps: int = 10_000) -> None:
        """Turn until all is done."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step(in_flight=in_flight)
        raise AssertionError(f"not idle after {max_steps} steps")

    def state(self, uid: int) -> Told:
        return self.told[uid]

    def assert_idle(self) -> None:
        """Every request has ended, and every page is free or evictable."""
        assert not self.scheduler.has_work
        self.scheduler.check()
        for uid, told in self.told.items():
            assert told.ended is not None, f"request {uid} has no outcome"
        load = self.scheduler.load()
        assert (load.running_requests, load.waiting_requests) == (0, 0)
        assert (load.outstanding_prompt_tokens, load.kv_protected_tokens) == (0, 0)
        assert self.scheduler.holdings.available_pages == self.limits.num_pages - 1

    def assert_tokens(self, uid: int) -> None:
        """The request's tokens are those of an uninterrupted run: all of them, or as far as it came."""
        told, (tokens, reason) = self.told[uid], reference(self.submits[uid], self.vocab_size)
        assert told.ended is not None
        if told.ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert told.tokens == tokens
            assert told.ended.reason is reason
            assert told.ended.matched_token_id == (tokens[-1] if reason is FinishReason.STOP else None)
        else:
            assert told.tokens == tokens[: len(told.tokens)]
        self._assert_logprobs(uid)

    def _assert_logprobs(self, uid: int) -> None:
        """What was told of the request's tokens is what the model says of them, whoever computed them and how often."""
        submit, told = self.submits[uid], self.told[uid]
        prompt = submit.token_ids.tolist()
        tokens = [*prompt, *told.tokens]
        hashes = np.cumsum(np.array([_mix(token, position) for position, token in enumerate(tokens)], dtype=np.uint64))
        expected = logprob(hashes[:-1], np.array(tokens[1:])).tolist()
        if submit.prompt_logprobs is None:
            assert told.prompt_logprobs == []
        else:
            assert told.prompt_logprobs == expected[: len(told.prompt_logprobs)]
            assert len(told.prompt_logprobs) == len(prompt) - 1 or not told.tokens
        if submit.logprobs is None:
            assert told.logprobs == []
        else:
            assert [each.logprob for each in told.logprobs] == expected[len(prompt) - 1 :]
            assert all(len(each.top_ids) == submit.logprobs for each in told.logprobs)

    def _after(self) -> None:
        if self._check_each_act:
            self.scheduler.check()
        outputs = self.scheduler.drain()
        if outputs is None:
            return
        for admitted in outputs.admitted:
            told = self.told[admitted.uid]
            assert told.ended is None
            told.admissions += 1
            told.cached_tokens = admitted.cached_tokens
        for run in outputs.prompt_logprobs:
            told = self.told[run.uid]
            assert not told.tokens, "the prompt's come first"
            assert told.ended is None
            assert run.start == len(told.prompt_logprobs) + 1, "runs join"
            assert len(run.top_ids) == len(run.logprobs) * (self.submits[run.uid].prompt_logprobs or 0)
            told.prompt_logprobs += run.logprobs.tolist()
        for output in outputs.outputs:
            told = self.told[output.uid]
            assert told.ended is None, "a token after the end"
            assert told.admissions == 1
            told.tokens.append(output.token_id)
            if output.logprobs is not None:
                told.logprobs.append(output.logprobs)
        for ended in outputs.ended:
            told = self.told[ended.uid]
            assert told.ended is None, "two outcomes"
            told.ended = ended

    def _guard(self, plan: StepPlan) -> None:
        """The step writes nothing that is cached, or that a launched step reads or writes for another row."""
        for start in plan.row_starts:
            assert all(start.row not in touched for touched in self._touched), "a row in flight is given away"
            self._slots_of_row[start.row] = start.prefix_slots
        touched: dict[int, np.ndarray] = {}
        offsets = np.cumsum(plan.lengths) - plan.lengths
        for row, start, length, offset in zip(plan.rows, plan.starts, plan.lengths, offsets, strict=True):
            written = plan.slots[offset : offset + length]
            known = self._slots_of_row[int(row)]
            assert len(known) == start, "a row skips or repeats positions"
            self._slots_of_row[int(row)] = touched[int(row)] = np.concatenate([known, written])
            for others in self._touched:
                for other_row, slots in others.items():
                    if other_row != row:
                        assert not np.isin(written, slots).any(), "a slot that is in flight is written"
        pages = [node.pages for node in self.scheduler.cache.nodes() if len(node.pages)]
        if pages:
            written_pages = plan.slots // self.limits.page_size
            assert not np.isin(written_pages, np.concatenate(pages)).any(), "a cached slot is written"
        self._touched.append(touched)

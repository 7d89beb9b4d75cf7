"""Sends a workload to a running fleet, in open loop: each request goes out at its time, whatever became of the others.

A closed loop waits for answers and so sends less to a fleet that is slow, which hides how slow it is ("coordinated
omission", G. Tene). Times here count from the moment at which a request was due, not from when it was really sent.
Each request is tried once: a refusal is a result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from loadtest.callers import Caller, CallFailed, Ended, NewTokens, Placed
from loadtest.results import Outcome, RunResult
from loadtest.workloads import Arrival, reusable_tokens


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    sent: int
    ended: int
    failed: int


@dataclass(frozen=True, slots=True, eq=False)
class Driven:
    """A run, and whether the machine that drove it kept up."""

    result: RunResult
    late_s: float
    """99th percentile of how late requests were sent. Much of it: this machine was too slow for the rate."""
    busy_share: float
    """CPU time of this process over the time of the run. Near 1: latencies are as much its own as the fleet's."""
    num_cut: int = 0
    """Requests of a run that was stopped that had been sent and had not ended: no outcome is theirs."""


def unfit(arrivals: Sequence[Arrival], max_context_tokens: int) -> int:
    """How many requests are longer than a model's context."""
    return sum(arrival.prompt_tokens + arrival.max_new_tokens > max_context_tokens for arrival in arrivals)


class Driver:
    """Drives one workload through one caller."""

    def __init__(
        self,
        caller: Caller,
        workers: Sequence[str],
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """`workers`: ids, in the order in which results count them; others that are told of are added."""
        self._caller = caller
        self._places = {worker: place for place, worker in enumerate(workers)}
        self._on_progress = on_progress
        self._gaps: list[float] = []
        self._gap_tokens: list[int] = []
        self._late: list[float] = []
        self._sent = self._ended = self._failed = 0
        self._tasks: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        """Send nothing more and cancel what runs: `drive` gives what has ended so far."""
        for task in self._tasks:
            task.cancel()

    async def drive(self, policy: str, arrivals: Sequence[Arrival]) -> Driven:
        """Send everything and wait for every end. `policy` names the run. Cancelling it cancels all requests."""
        ceilings = reusable_tokens(arrivals)
        outcomes = [
            Outcome(arrival.at_s, arrival.prompt_tokens, 0, ceiling)
            for arrival, ceiling in zip(arrivals, ceilings, strict=True)
        ]
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        async with asyncio.TaskGroup() as group:
            self._tasks.append(group.create_task(self._send_all(group, arrivals, outcomes, began_s)))
        duration_s = time.monotonic() - began_s
        result = RunResult(
            policy=policy,
            num_workers=len(self._places),
            duration_s=duration_s,
            outcomes=[outcome for outcome in outcomes if outcome.ended_s is not None],
            gaps_s=np.array(self._gaps, dtype=np.float64),
            gap_tokens=np.array(self._gap_tokens, dtype=np.int64),
            busy_s=(),
        )
        late_s = float(np.percentile(self._late, 99)) if self._late else 0.0
        busy_share = (time.process_time() - began_cpu_s) / duration_s
        return Driven(result, late_s, busy_share, self._sent - self._ended)

    async def _send_all(
        self, group: asyncio.TaskGroup, arrivals: Sequence[Arrival], outcomes: Sequence[Outcome], began_s: float
    ) -> None:
        for arrival, outcome in zip(arrivals, outcomes, strict=True):
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
            self._tasks.append(group.create_task(self._send(arrival, outcome, began_s)))

    async def _send(self, arrival: Arrival, outcome: Outcome, began_s: float) -> None:
        self._late.append(max(0.0, time.monotonic() - began_s - arrival.at_s))
        self._sent += 1
        try:
            await self._follow(arrival, outcome, began_s)
        except CallFailed as error:
            outcome.error = str(error)
            self._failed += 1
        outcome.ended_s = time.monotonic() - began_s
        self._ended += 1
        self._on_progress(Progress(self._sent, self._ended, self._failed))

    async def _follow(self, arrival: Arrival, outcome: Outcome, began_s: float) -> None:
        last_s = 0.0
        async with aclosing(self._caller.call(arrival)) as saying:
            async for said in saying:
                now_s = time.monotonic() - began_s
                match said:
                    case Placed():
                        self._placed(said, outcome)
                    case NewTokens(count):
                        if outcome.first_token_s is None:
                            outcome.first_token_s = now_s
                        else:
                            self._gaps.append((now_s - last_s) / count)
                            self._gap_tokens.append(count)
                        last_s = now_s
                        outcome.output_tokens += count
                    case Ended():
                        outcome.first_token_s = now_s if outcome.first_token_s is None else outcome.first_token_s
                        outcome.output_tokens = said.output_tokens
                        outcome.started_s = None if said.queue_s is None else arrival.at_s + said.queue_s
                        if said.cached_tokens is not None:
                            outcome.cached_tokens = said.cached_tokens
                        if said.prompt_tokens is not None:
                            _recount(outcome, said.prompt_tokens)

    def _placed(self, placed: Placed, outcome: Outcome) -> None:
        outcome.cached_tokens = placed.cached_tokens
        if placed.worker_id:
            outcome.worker = self._places.setdefault(placed.worker_id, len(self._places))
        if placed.route is not None:
            outcome.reason = placed.route.reason
            outcome.tries = 1 + placed.route.retries
            outcome.predicted_tokens = placed.route.predicted_cached_tokens
            outcome.reachable_tokens = placed.route.reachable_cached_tokens


def _recount(outcome: Outcome, prompt_tokens: int) -> None:
    """Of a prompt that was sent as text the server knows how long it is; what was shared of it is as large a part."""
    outcome.ceiling_tokens = round(outcome.ceiling_tokens * prompt_tokens / outcome.prompt_tokens)
    outcome.prompt_tokens = prompt_tokens

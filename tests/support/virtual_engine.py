"""An engine's loop before a simulated device, in virtual time, with clients that ask in a closed or an open loop.

What takes time: the device, as its cost model says, planning a step, and the way between client and engine. A request
is as long under way as `Clients` says; those that are sent together arrive one after another.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from radixfleet.clock import ManualClock
from tests.support.engine_fakes import ListeningFront
from tests.support.sim_worker import make_submit
from worker.core.messages import Prepare, Prepared, StepOutputs
from worker.core.step import StepPlan, StepResult
from worker.engine.loop import EngineLoop
from worker.engine.pacing import Pacing
from worker.runner.sim import CostModel, SimRunner, SimRunnerConfig
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler

CPU = CostModel(step_s=16.8e-3, prefill_token_s=3e-4, decode_token_s=1.5e-3, context_token_s=0.0)
"""The demonstration model in bf16 on two threads with AMX."""
STEP_COST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Clients:
    """Who asks, and for what. Every prompt begins with the same `prefix_tokens`."""

    requests: int = 32
    concurrency: int = 8
    """In closed loop: each asks again when it has its answer."""
    prefix_tokens: int = 512
    unique_tokens: int = 64
    new_tokens: int = 64
    way_s: float = 2e-3
    """From client to engine, and back."""
    apart_s: float = 1.2e-3
    """Between two requests that are sent together."""
    arrivals_s: Sequence[float] = ()
    """When they are sent; empty: closed loop."""


@dataclass(slots=True)
class Asked:
    """One request, as its client sees it; in seconds."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.token_times_s[0] - self.sent_s


class VirtualExecutor:
    """A device with a queue, whose steps end when the clock has come there."""

    def __init__(self, runner: SimRunner) -> None:
        self._runner = runner
        self._num_queued = 0
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._runner.enqueue(plan)
        self._num_queued += 1

    @property
    def time_left_s(self) -> float:
        """Until the step that runs ends."""
        return self._runner.time_left_s() if self._num_queued else np.inf

    def results(self) -> list[StepResult]:
        results = []
        while self._num_queued and self._runner.time_left_s() <= 0:
            results.append(self._runner.collect())
            self._num_queued -= 1
        return results

    def prepare(self, order: Prepare) -> None:
        raise AssertionError("nobody asks for grammars")

    def prepared(self) -> list[Prepared]:
        return []

    def take_layers_computed(self) -> bool:
        return False


class VirtualEngine:
    """See the head of the module."""

    def __init__(
        self,
        clients: Clients,
        *,
        cost: CostModel = CPU,
        paced: bool,
        step_cost_tokens: int,
        max_running: int | None = None,
        chunk: int = 2048,
        plan_s: float = 6e-4,
        overlap: bool = True,
    ) -> None:
        """`paced`: steps are planned when they are due. `max_running`: default: as many as ask at once."""
        self.clock = ManualClock(1.0)
        self._clients = clients
        self._plan_s = plan_s
        self._prefix = np.random.default_rng(0).integers(0, 32_000, clients.prefix_tokens)
        config = SimRunnerConfig(
            max_running_requests=max_running or clients.concurrency, chunked_prefill_size=chunk, cost=cost
        )
        runner = SimRunner(config, self.clock)
        limits = replace(Limits.from_ready(runner.load(), order="lpm"), step_cost_tokens=step_cost_tokens)
        self.executor = VirtualExecutor(runner)
        self._front = ListeningFront()
        self._scheduler = Scheduler(limits, self.clock)
        pacing = Pacing() if paced else None
        self._loop = EngineLoop(self._scheduler, self.executor, self._front, self.clock, overlap=overlap, pacing=pacing)
        self.asked: dict[int, Asked] = {}
        self._on_their_way: list[tuple[float, int]] = []
        """When each arrives, and its uid."""

    def run(self) -> list[Asked]:
        """All requests to their ends, in the order in which they were sent."""
        clients = self._clients
        began_s = self.clock.now()
        if clients.arrivals_s:
            for arrival_s in clients.arrivals_s:
                self._send(began_s + arrival_s, 0)
        else:
            for index in range(clients.concurrency):
                self._send(began_s, index)
        while self._on_their_way or self._scheduler.has_work:
            self._arrive()
            num_plans = len(self.executor.plans)
            is_busy = self._loop.turn()
            if len(self.executor.plans) > num_plans:
                self.clock.advance(self._plan_s)
            self._hear()
            if not is_busy:
                self._sleep()
        return list(self.asked.values())

    def _send(self, at_s: float, place: int) -> None:
        uid = len(self.asked) + 1
        self.asked[uid] = Asked(at_s)
        heapq.heappush(self._on_their_way, (at_s + self._clients.way_s + place * self._clients.apart_s, uid))

    def _arrive(self) -> None:
        while self._on_their_way and self._on_their_way[0][0] <= self.clock.now():
            _, uid = heapq.heappop(self._on_their_way)
            unique = np.random.default_rng(uid).integers(0, 32_000, self._clients.unique_tokens)
            prompt = np.concatenate([self._prefix, unique])
            self._front.inbox.append(make_submit(uid, prompt, self._clients.new_tokens))

    def _hear(self) -> None:
        at_client_s = self.clock.now() + self._clients.way_s
        for message in self._front.take(StepOutputs):
            for output in message.outputs:
                self.asked[output.uid].token_times_s.append(at_client_s)
                self.asked[output.uid].tokens.append(output.token_id)
            for place, _ in enumerate(message.ended):
                if not self._clients.arrivals_s and len(self.asked) < self._clients.requests:
                    self._send(at_client_s, place)

    def _sleep(self) -> None:
        """Until something happens."""
        arrives_in_s = self._on_their_way[0][0] - self.clock.now() if self._on_their_way else np.inf
        self.clock.advance(max(1e-6, min(self._loop.wait_s, self.executor.time_left_s, arrives_in_s)))
